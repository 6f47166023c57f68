"""CPU time of one push over all processes, and how much gossip slows training down.

Phases with and without `peer.step()` alternate on the same live peers, so that heartbeats and the DHT cancel out of the
difference. For the slowdown each peer has one core, which is busy, so all CPU time of gossip is taken from training,
and gossip keeps to its default share of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.measure import cpu_s
from benchmarks.row import Row
from benchmarks.shapes import gpt2_124m, gpt_25m
from benchmarks.swarm import Phase, Setup, Swarm
from benchmarks.workloads import Busy, Pause, demo_model, train_demo_model
from p2ptrain.settings.peer_config import NetworkConfig

# p of the demo, and SPARTA's for larger models.
DEMO_FRACTION = 0.02
FRACTION = 0.005
MOST_SLOWDOWN = 0.02
# Below this share of a core per computing peer, a slowdown is not judged (guess).
MIN_CORE_SHARE = 0.9
# More than the limit of 20 pushes a second, so every step pushes.
PAUSE = Pause(0.06)


def run() -> list[Row]:
    return [
        _push_cpu("demo model, p = 2 %", Setup(demo_model, PAUSE, DEMO_FRACTION), limit_ms=2.0),
        _push_cpu("25M, p = 0.5 %", Setup(gpt_25m, PAUSE, FRACTION), limit_ms=None),
        _slowdown("25M, p = 0.5 %, 100 ms a step", Setup(gpt_25m, Busy(0.1), FRACTION), steps=30),
        _slowdown("124M, p = 0.5 %, 100 ms a step", Setup(gpt2_124m, Busy(0.1), FRACTION), steps=30),
        _slowdown(
            "demo model, p = 2 %, trained for real", Setup(demo_model, train_demo_model, DEMO_FRACTION), steps=500
        ),
    ]


def _push_cpu(name: str, setup: Setup, *, limit_ms: float | None) -> Row:
    steps, pairs = 100, 3
    costs = []
    with Swarm(setup, peers=2) as swarm:
        swarm.warm_up()
        for _ in range(pairs):
            idle_s, _ = _cpu_of_phase(swarm, Phase(steps, exchange=False))
            busy_s, pushes = _cpu_of_phase(swarm, Phase(steps))
            costs.append((busy_s - idle_s) / pushes)
    cost_s = statistics.median(costs)
    return Row(
        work=f"CPU of one push: {name}; gather to merge, two peers and their p2pds",
        must_reach=f"≤ {limit_ms:g} ms" if limit_ms else "",
        measured=f"{1e3 * cost_s:.3g} ms (of {pairs} × {2 * steps} pushes: {_span(costs, 1e3)})",
        reached=1e3 * cost_s <= limit_ms if limit_ms else None,
        values={"push_cpu_s": cost_s},
    )


def _cpu_of_phase(swarm: Swarm, phase: Phase) -> tuple[float, int]:
    """CPU seconds of all processes during a phase, and the pushes in it."""
    before_s = cpu_s(swarm.pids)
    peers = swarm.run(phase)
    return cpu_s(swarm.pids) - before_s, sum(step.report.sent for steps in peers for step in steps if step.report)


def _slowdown(name: str, setup: Setup, *, steps: int) -> Row:
    rounds = 5
    setup = dataclasses.replace(setup, gossip_budget=NetworkConfig.gossip_budget, own_core=True)
    wall: list[float] = []
    cpu: list[float] = []
    with Swarm(setup, peers=2) as swarm:
        swarm.warm_up()
        for _ in range(rounds):
            # Without, with, with, without: a machine that becomes busier or idler affects both alike.
            phases = [_wall_and_cpu(swarm, Phase(steps, exchange=exchange)) for exchange in (False, True, True, False)]
            (wall_0, cpu_0), (wall_1, cpu_1), (wall_2, cpu_2), (wall_3, cpu_3) = phases
            wall.append((wall_1 + wall_2) / (wall_0 + wall_3) - 1)
            cpu.append((cpu_1 + cpu_2) / (cpu_0 + cpu_3) - 1)
    slowdown, more_cpu = statistics.median(wall), statistics.median(cpu)
    # If other programs use this machine, the scheduler has more influence than gossip: no verdict then.
    share = (cpu_0 + cpu_3) / (wall_0 + wall_3)
    steady = share >= MIN_CORE_SHARE
    return Row(
        work=f"gossip slows training: {name}, a core for each of two peers",
        must_reach=f"≤ {100 * MOST_SLOWDOWN:g} %",
        measured=f"{100 * slowdown:+.1f} % ({_span(wall, 100)}); CPU of all processes {100 * more_cpu:+.1f} %"
        + ("" if steady else f"; too busy a machine to tell: each peer had {100 * share:.0f} % of a core"),
        reached=slowdown <= MOST_SLOWDOWN if steady else None,
        values={"slowdown": slowdown, "more_cpu": more_cpu, "core_share": share, "alone_step_s": wall_0 / (2 * steps)},
    )


def _wall_and_cpu(swarm: Swarm, phase: Phase) -> tuple[float, float]:
    """Run a phase. Returns seconds of all steps, summed over the peers, and CPU seconds of all processes."""
    before_s = cpu_s(swarm.pids)
    peers = swarm.run(phase)
    return sum(step.whole_s for steps in peers for step in steps), cpu_s(swarm.pids) - before_s


def _span(values: Sequence[float], factor: float) -> str:
    return f"{factor * min(values):.2g} to {factor * max(values):.2g}"
