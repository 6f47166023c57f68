"""Measure the speed of the demo's peers on this machine, in about two seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import batch_windows, build, context_length
from p2ptrain.training.trainer import Trainer, TrainingData

MODEL = "gpt-demo"
WARM_UP_STEPS = 20
MEASURE_S = 2.0
# Time of a step in a swarm, relative to training alone: exchange, evaluation, libp2p and other processes add to it
# (measured on a shared machine: 1.0 to 1.5).
SWARM_FACTOR = 1.3


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
        for process in processes:
            process.wait()
