"""A round at 25M parameters with four peers, from the time it is due until it has landed on the last of them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import rival_hivemind
from benchmarks.measure import Summary, cpu_s, milliseconds
from benchmarks.row import Row
from benchmarks.shapes import gpt_25m
from benchmarks.swarm import Phase, Setup, Step, Swarm
from benchmarks.workloads import Pause

PEERS = 4
ROUNDS = 6
# Of the time and the CPU of hivemind's averager, in its faster setting.
MUST_REACH = 0.7
# Steps without an exchange, from which the CPU of a training step is taken.
QUIET_STEPS = 100
# Nothing trains beside hivemind's rounds, so our peers do not compute either: 200 steps of 20 ms between rounds.
SETUP = Setup(gpt_25m, Pause(0.02), sync_every=200, round_steps=1000)


def run() -> list[Row]:
    default = rival_hivemind.measure(state_sharing=True, peers=PEERS, rounds=ROUNDS)
    ours = measure(SETUP, PEERS, ROUNDS)
    tuned = rival_hivemind.measure(state_sharing=False, peers=PEERS, rounds=ROUNDS)
    wall, stall, cpu = Summary.of(ours.wall_s), Summary.of(ours.stall_s), Summary.of(ours.cpu_s)
    longest = Summary.of(ours.longest_s)
    rivals = {
        name: rival for name, rival in (("as it comes", default), ("its state sharing off", tuned)) if rival.seconds
    }
    rival_wall_s = {name: Summary.of(rival.seconds).median for name, rival in rivals.items()}
    rival_cpu_s = {name: Summary.of(rival.cpu_s).median for name, rival in rivals.items()}
    return [
        Row(
            work="a round, 25M parameters, int8, 4 peers: due to landed, slowest peer",
            must_reach=f"≤ {MUST_REACH:g} × hivemind's averager in fp16",
            measured=f"{wall.median:.2f} s median, {wall.maximum:.2f} s worst of {wall.count}; {ours.failed} failed",
            reached=wall.median <= MUST_REACH * min(rival_wall_s.values(), default=math.inf),
            rival=f"hivemind 1.1.12: {_told(rival_wall_s)}; {default.failed + tuned.failed} failed",
            values={
                "wall_s": wall.median,
                "worst_s": wall.maximum,
                **{f"rival_wall_s, {name}": seconds for name, seconds in rival_wall_s.items()},
            },
        ),
        Row(
            work="… CPU of all processes, p2pds included, without the training steps",
            must_reach=f"≤ {MUST_REACH:g} × hivemind's",
            measured=f"{cpu.median:.2f} s",
            reached=cpu.median <= MUST_REACH * min(rival_cpu_s.values(), default=math.inf),
            rival=_told(rival_cpu_s),
            values={
                "cpu_s": cpu.median,
                **{f"rival_cpu_s, {name}": seconds for name, seconds in rival_cpu_s.items()},
            },
        ),
        Row(
            work="… training thread held longer than usual in one step, most held peer",
            must_reach="≤ 40 ms",
            measured=f"{milliseconds(longest.median)} median, {milliseconds(longest.maximum)} worst",
            reached=longest.median <= 0.04,
            values={"longest_s": longest.median, "worst_longest_s": longest.maximum},
        ),
        Row(
            work="… in all steps of the round",
            must_reach="≤ 60 ms",
            measured=f"{milliseconds(stall.median)} median, {milliseconds(stall.maximum)} worst",
            reached=stall.median <= 0.06,
            values={"stall_s": stall.median, "worst_stall_s": stall.maximum},
        ),
    ]


@dataclass(frozen=True)
class Rounds:
    """Times of each round that all peers committed, and the number of other rounds.

    `longest_s` is by how much the longest `peer.step()` was longer than the median one. `cpu_s` is what a round takes:
    from just before it is due until it has landed, without the steps of that time.
    """

    wall_s: list[float]
    stall_s: list[float]
    longest_s: list[float]
    cpu_s: list[float]
    failed: int


def measure(setup: Setup, peers: int, rounds: int) -> Rounds:
    """Measure rounds of some peers, after one that is not counted. Raises WorkerError if a peer fails."""
    wall_s, stall_s, longest_s, used_s, failed = [], [], [], [], 0
    with Swarm(setup, peers) as swarm:
        swarm.drift()
        swarm.round()  # the first round may have a single member
        time.sleep(1.0)  # what follows a round has ended
        before_s = cpu_s(swarm.pids)
        swarm.run(Phase(QUIET_STEPS, exchange=False))  # so no round becomes due
        step_s = (cpu_s(swarm.pids) - before_s) / (peers * QUIET_STEPS)
        for _ in range(rounds):
            swarm.drift()
            swarm.approach()
            before_s = cpu_s(swarm.pids)
            steps_of = swarm.round()
            if steps_of is None:
                failed += 1
                continue
            used_s.append(cpu_s(swarm.pids) - before_s - step_s * sum(len(steps) for steps in steps_of))
            wall_s.append(max(_round_s(steps) for steps in steps_of))
            beyond_s = [_beyond_s(steps) for steps in steps_of]
            stall_s.append(max(map(sum, beyond_s)))
            longest_s.append(max(map(max, beyond_s)))
    return Rounds(wall_s, stall_s, longest_s, used_s, failed)


def _told(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.2f} s {name}" for name, value in seconds.items()) or "none worked"


def _round_s(steps: Sequence[Step]) -> float:
    """Seconds from the step that made the round due to the end of the step in which it landed."""
    return sum(step.whole_s for before, step in itertools.pairwise(steps) if before.due)


def _beyond_s(steps: Sequence[Step]) -> list[float]:
    """Seconds that each `peer.step()` took beyond the median one."""
    usual_s = Summary.of(step.exchange_s for step in steps).median
    return [max(0.0, step.exchange_s - usual_s) for step in steps]
