"""Plans the demo: measures a step, and chooses the run's length, when a peer is killed and when another one joins."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import batch_windows, build, context_length
from p2ptrain.training.trainer import Trainer, TrainingData

RUN_ID = "p2ptrain-demo"
# Two rounds before the kill, one without the killed peer, two with the late peer, and the last one.
ROUNDS = 6
MIN_SYNC_EVERY = 25
# Shares of the run's steps. The kill also waits until a round has landed: before, the founder is the only voter.
KILL_AT = 0.40
JOIN_AT = 0.55
# In a short demo both come earlier, but not before all peers train.
EARLIEST_START = 0.20
# Seconds, measured on two shared cores: from the start of the peers to their first steps; from the start of one more
# peer to its first step while the other peers train; from the last step to the end of the demo.
PEERS_START_S = 14.0
LATE_START_S = 12.0
END_S = 6.0
# Enough for a late peer to start and train.
MIN_TRAINING_S = 2 * LATE_START_S
# From the start of the bootstrap node to its addresses, on the same machine. If it takes longer now, every start takes
# longer by the same factor. Beyond MAX_SLOWNESS a demo would become too long.
BOOTSTRAP_START_S = 3.0
MAX_SLOWNESS = 4.0
MODEL = "gpt-demo"
WARM_UP_STEPS = 20
MEASURE_S = 2.0
# Time of a step in a swarm, relative to training alone: exchange, evaluation, libp2p and other processes add to it
# (measured on a shared machine: 1.0 to 1.5).
SWARM_FACTOR = 1.3


@dataclass(frozen=True)
class DemoPlan:
    """A run's length and schedule.

    Attributes:
        peers: number of peers.
        seed: seed of the initial weights, the fragments and, with a peer's number, its text.
        steps: length of the run in inner steps.
        sync_every: H, inner steps between two rounds.
        eval_every: inner steps between two evaluations.
        kill_at_step: step at which one peer is killed, or later: not before the first round has landed.
        join_at_step: step at which one more peer is started.
    """

    peers: int
    seed: int
    steps: int
    sync_every: int
    eval_every: int
    kill_at_step: int
    join_at_step: int

    @property
    def run_flags(self) -> list[str]:
        """The run's settings, as flags of `p2ptrain join`."""
        return as_flags(
            {
                "run-id": RUN_ID,
                "steps": self.steps,
                "sync-every": self.sync_every,
                # p = 2 %: keeps the correlation of the demo model's peers above 0.999 (measured).
                "fragment-fraction": 0.02,
                # A plain mean: with fewer than 20 rounds Nesterov's momentum overshoots (measured).
                "outer-lr": 1,
                "outer-momentum": 0,
                "warmup-steps": min(50, self.steps // 8),
                "run-seed": self.seed,
            }
        )

    def peer_seed(self, number: int) -> int:
        """Seed of the text that a peer trains on."""
        return 1000 * self.seed + number


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Arguments of a command for these settings."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def make_plan(*, peers: int, seed: int, step_s: float, time_left_s: float, bootstrap_s: float) -> DemoPlan:
    """Choose the length of the run so that the demo ends in time.

    Args:
        peers: number of peers.
        seed: seed of the run.
        step_s: seconds of one inner step while all peers train.
        time_left_s: seconds from the start of the peers to the planned end of the demo.
        bootstrap_s: seconds that the start of the bootstrap node took.
    """
    slowness = min(MAX_SLOWNESS, max(1.0, bootstrap_s / BOOTSTRAP_START_S))
    training_s = max(slowness * MIN_TRAINING_S, time_left_s - slowness * (PEERS_START_S + END_S))
    sync_every = max(MIN_SYNC_EVERY, round(training_s / step_s / ROUNDS))
    steps = ROUNDS * sync_every
    # Start the late peer early enough that it trains at JOIN_AT.
    start_late_at = max(EARLIEST_START, JOIN_AT - slowness * LATE_START_S / training_s)
    kill_at = min(KILL_AT, start_late_at - 0.02)
    eval_every = max(10, sync_every // 10)  # an evaluation takes as long as six steps
    kill_at_step, join_at_step = round(kill_at * steps), round(start_late_at * steps)
    return DemoPlan(peers, seed, steps, sync_every, eval_every, kill_at_step, join_at_step)


def measure_step_s(peers: int) -> float:
    """Seconds that one inner step of the demo model takes while `peers` processes train.

    Measured while `peers - 1` other processes keep the CPU busy, so that shared cores, CPU quotas of containers and
    the load of the machine are included.
    """
    run = RunConfig(model=MODEL)
    model = build(MODEL, vocab_size=run.vocab_size, seed=0)
    batch_size = batch_windows(MODEL, context_length(model), None)
    trainer = Trainer(model, TrainingData(load_corpus("stdlib", Characters())), run, batch_size=batch_size, seed=0)
    for step in range(WARM_UP_STEPS):
        trainer.step(step)
    with _busy_processes(peers - 1):
        start_s = time.monotonic()
        steps = 0
        while time.monotonic() - start_s < MEASURE_S:
            trainer.step(steps)
            steps += 1
        return SWARM_FACTOR * (time.monotonic() - start_s) / steps


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    # They end by themselves if we are killed. Each has its own session, as peers have: Linux schedules per session.
    program = f"import time\nend = time.monotonic() + {3 * MEASURE_S}\nwhile time.monotonic() < end: pass"
    command = [sys.executable, "-I", "-S", "-c", program]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
