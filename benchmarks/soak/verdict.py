"""Whether a soak was come through: what its peers may not do, and what they may not need more of as time goes on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.peers import Usage
from benchmarks.soak.storm import Soak

# A peer has loaded what it needs, and holds the three checkpoints that are kept, by then.
SETTLED_S = 200.0
# Too few measurements say nothing.
LEAST_USAGES = 8
# What is no leak. A peer's resident memory swings by a few per cent, and a fourth checkpoint is a third more disk. Of
# files and threads, one lost with each fault is 15 from the first to the last quarter of twenty minutes.
MOST_SHARE, MOST_MORE = 0.2, 10


@dataclass(frozen=True)
class Growth:
    """What one process needed of something: medians of the first and the last quarter of its settled life.

    Attributes:
        unit: of the two numbers.
        most: the last may be as large as this.
        rule: the same in words.
    """

    name: str
    unit: str
    early: float
    late: float
    most: float
    rule: str

    @property
    def leaks(self) -> bool:
        return self.late > self.most


def growths(usage: Sequence[Usage]) -> list[Growth]:
    """Of memory, files, threads and disk, from what was measured of one process; empty when that is too little."""
    settled = [one for one in usage if one.t - usage[0].t > SETTLED_S]
    if len(settled) < LEAST_USAGES:
        return []
    quarter = len(settled) // 4

    def growth(name: str, of: str, unit: str, scale: float) -> Growth:
        early, late = (
            statistics.median(getattr(one, of) for one in part) / scale
            for part in (settled[:quarter], settled[-quarter:])
        )
        if unit:
            return Growth(name, unit, early, late, early * (1 + MOST_SHARE), f"≤ {MOST_SHARE:.0%} more")
        return Growth(name, unit, early, late, early + MOST_MORE, f"≤ {MOST_MORE} more")

    return [
        growth("memory", "resident_bytes", "MB", 1e6),
        growth("open files", "files", "", 1),
        growth("threads", "threads", "", 1),
        growth("disk without metrics and log", "disk_bytes", "kB", 1e3),
    ]


def failures(soak: Soak) -> list[str]:
    """What no soak may show, a line each; empty after one that was come through."""
    found = list(soak.run_audit.disagreements)
    if not soak.run_audit.committed:
        found.append("no round was committed")
    if soak.together is None:
        last = "; ".join(f"{peer.name}: {_last_round(soak, peer.name)}" for peer in soak.peers)
        waited_s = soak.end_s - soak.over_s
        found.append(f"no round of the {waited_s:.0f} s after the storm was landed by all peers (the last of {last})")
    found += [
        f"{soak.peers[-1].name} needs more and more {growth.name}: {growth.early:.0f} → {growth.late:.0f}"
        f"{growth.unit and ' '}{growth.unit} (rule: {growth.rule})"
        for growth in growths(soak.peers[-1].usage)
        if growth.leaks
    ]
    return found


def _last_round(soak: Soak, peer: str) -> str:
    landed = [round_ for round_ in soak.run_audit.rounds.values() if peer in round_.states]
    if not landed:
        return "none"
    last = max(landed, key=lambda round_: round_.t)
    return f"round {last.round} of lineage {last.lineage[:8]}"
