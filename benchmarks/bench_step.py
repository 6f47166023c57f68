"""How long `peer.step()` blocks training at 124M parameters, in steps that merge a fragment."""

from __future__ import annotations

from collections import Counter

from benchmarks import rival_exogym
from benchmarks.measure import Summary
from benchmarks.row import Row
from benchmarks.shapes import gpt2_124m
from benchmarks.swarm import Phase, Setup, Step, Swarm
from benchmarks.workloads import Busy, Pause

STEPS = 120
MUST_REACH_MS = 3.0
# A step of the model takes seconds on a CPU, but 100 ms on a GPU, with the CPU free in that time. With every core busy,
# `peer.step()` also waits for a core and for the GIL, as in training on a CPU.
WORK: dict[str, Pause | Busy] = {"CPU free between steps": Pause(0.1), "every core computing": Busy(0.1)}


def run() -> list[Row]:
    rival = Summary.of(rival_exogym.measure(fragment_fraction=0.005))
    return [
        *(_measure(0.005, work, rival) for work in WORK),
        *(_measure(0.001, work, rival=None) for work in WORK),
    ]


def _measure(fragment_fraction: float, work: str, rival: Summary | None) -> Row:
    setup = Setup(model=gpt2_124m, fragment_fraction=fragment_fraction, work=WORK[work])
    with Swarm(setup, peers=2) as swarm:
        swarm.warm_up()
        steps = [step for peer in swarm.run(Phase(steps=STEPS)) for step in peer]
    took = Summary.of(step.exchange_s for step in steps if _merged(step))
    sent = sum(step.report.sent for step in steps if step.report)
    merged = sum(_merged(step) for step in steps)
    skipped = sum((Counter(step.report.skipped) for step in steps if step.report), Counter[str]())
    skipped["not arrived"] = max(0, sent - merged - skipped.total())
    losses = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    return Row(
        work=f"peer.step(), p = {100 * fragment_fraction:g} %, {work}: steps that merged a fragment",
        must_reach=f"≤ {MUST_REACH_MS:g} ms median",
        measured=f"{took.milliseconds()}; merged {merged} of {sent} fragments" + (f" ({losses})" if losses else ""),
        reached=1e3 * took.median <= MUST_REACH_MS,
        rival=f"exo gym's exchange: {rival.milliseconds()}" if rival else "",
        values={
            "median_s": took.median,
            "p99_s": took.p99,
            "reported_median_s": Summary.of(step.report.exchange_s for step in steps if step.report).median,
            "sent": sent,
            "merged": merged,
            **({"rival_median_s": rival.median, "rival_p99_s": rival.p99} if rival else {}),
        },
    )


def _merged(step: Step) -> int:
    return step.report.merged if step.report else 0
