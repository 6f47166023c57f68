"""The results of a soak as a table in Markdown.

A peer that is cut off still counts as live: it trains on, its steps are part of the goodput, and the time that its
exchanges take is included. Only peers that are down or paused do not count.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from benchmarks.soak.peers import SoakPeer
from benchmarks.soak.plan import CUT
from benchmarks.soak.storm import Soak
from benchmarks.soak.time_use import format_time_use, shares, spans
from benchmarks.soak.verdict import growths


def format_soak(soak: Soak, *, seed: int) -> str:
    """Format the results: a table of measure, target and measurement, and one of where the time went."""
    run_audit, peers = soak.run_audit, soak.peers
    storm_s, kinds = soak.over_s - soak.storm_s, Counter(fault.kind for _, fault in soak.done)
    sizes = run_audit.participation
    rounds = sum(sizes.values())
    joins = [join for join in run_audit.joins if join.started_s >= soak.storm_s]
    lived_s = sum(_awake_s(peer, soak) for peer in peers)
    last = [list(round_.states) for round_ in run_audit.committed if round_.t > soak.over_s]
    rows = [
        ("peers, minutes of storm, faults (seed)", "",
         f"{len(peers)}, {storm_s / 60:.1f}, {len(soak.done)} ({seed}): "
         + ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))),
        ("goodput: inner steps in the storm, against those of as long a calm", "reported", f"{goodput(soak):.1%}"),
        ("… lost while a process was down or paused", "", f"{1 - lived_s / (len(peers) * storm_s):.1%}"),
        ("time that exchanges blocked the training of live peers", "≤ 3 %",
         f"{sum(peer.blocked_s for peer in peers) / _training_s(soak):.2%}"),
        ("rounds committed / skipped (in one peer's view)", "", f"{rounds} / {run_audit.skipped}"),
        ("longest time without a committed round, from one to the next", "", _longest_gap(soak)),
        ("contributors of a round", "",
         f"{statistics.fmean(sizes.elements()):.2f} on average ("
         + ", ".join(f"{size}: {count}" for size, count in sorted(sizes.items())) + ")" if rounds else "-"),
        ("committed rounds of which all peers hold equal hashes", "100 %", f"{run_audit.agreement:.0%} of {rounds}"),
        ("states replaced by a peer that trained (repairs)", "", str(run_audit.repairs)),
        ("joins and restarts: start of the process to the run's state", "", _spread([j.state_s for j in joins])),
        ("… to the first step", "", _spread([j.step_s for j in joins])),
        ("… to the first round that it contributed to", "", _spread([j.round_s for j in joins])),
        ("after the storm: rounds, landed by", "all", f"{len(last)}, {max(map(len, last), default=0)} peers"),
        ("… until a round that all landed had been committed", "",
         f"{soak.together.t - soak.over_s:.0f} s" if soak.together else "there was none"),
        *((f"{one.name}, first and last quarter (the peer that is never replaced)", one.rule,
           f"{one.early:.0f} → {one.late:.0f} {one.unit}".rstrip()) for one in growths(peers[-1].usage)),
        ("CPU of a peer, daemon included", "about half a core",
         f"{sum(p.used_cpu_s for p in peers) / (len(peers) * (soak.end_s - soak.calm_s)):.2f} cores on average"),
    ]  # fmt: skip
    lines = ["| measure | wanted | measured |", "|---|---|---|"]
    lives = [spans(peer.diary, peer.pauses, soak.step_s) for peer in peers]
    calm, storm = shares(lives, soak.calm_s, soak.storm_s), shares(lives, soak.storm_s, soak.over_s)
    return "\n".join(
        [*lines, *(f"| {' | '.join(row)} |" for row in rows), "", format_time_use(calm, storm, len(peers) * storm_s)]
    )


def goodput(soak: Soak) -> float:
    """Steps per second of all peers during the faults, as a share of those before them."""

    def rate(start: float, end: float) -> float:
        return sum(start < t <= end for peer in soak.peers for t in peer.steps) / (end - start)

    return rate(soak.storm_s, soak.over_s) / rate(soak.calm_s, soak.storm_s)


def _awake_s(peer: SoakPeer, soak: Soak) -> float:
    """Seconds of the storm in which the peer's process ran and was not paused."""
    away_s = sum(fault.lasts_s for _, fault in soak.done if peer.number in fault.peers and fault.kind != CUT)
    return soak.over_s - soak.storm_s - away_s


def _training_s(soak: Soak) -> float:
    """Seconds of all peers' steps, including their exchanges."""
    total = 0.0
    for peer in soak.peers:
        for before, after in itertools.pairwise(peer.steps):
            # In longer gaps the peer was down or paused.
            total += after - before if after - before < 2 else 0.0
    return total


def _longest_gap(soak: Soak) -> str:
    times = sorted(round_.t for round_ in soak.run_audit.committed if round_.t > soak.calm_s)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return f"{max(gaps):.0f} s; {statistics.median(gaps):.1f} s is normal" if gaps else "-"


def _spread(seconds: Sequence[float | None]) -> str:
    times = sorted(s for s in seconds if s is not None)
    missing = f"; {len(seconds) - len(times)} never did" if len(times) < len(seconds) else ""
    return f"{statistics.median(times):.1f} s median, {times[-1]:.1f} s most ({len(times)}){missing}" if times else "-"
