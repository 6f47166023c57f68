"""The verdict on a soak: agreement between the peers, and no growing use of memory, files, threads or disk."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.peers import Usage
from benchmarks.soak.storm import Soak

# By then a peer has loaded everything and has the maximum of three checkpoints.
SETTLED_S = 200.0
# Fewer measurements are not judged.
LEAST_USAGES = 8
# Growth that is not called a leak. Resident memory varies by a few per cent, and a fourth checkpoint takes a third more
# disk. One file or thread lost with each fault adds up to 15 from the first to the last quarter of twenty minutes.
MOST_SHARE, MOST_MORE = 0.2, 10


@dataclass(frozen=True)
class Growth:
    """How much of a resource one process used: medians of the first and the last quarter after SETTLED_S.

    Attributes:
        unit: unit of `early` and `late`.
        most: the largest `late` that is no leak.
        rule: `most` in words.
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
    """The growth of memory, files, threads and disk of one process; empty if there are too few measurements."""
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
        growth("disk without metrics, log and manifests", "disk_bytes", "kB", 1e3),
    ]


def failures(soak: Soak) -> list[str]:
    """The failures of a soak, one line each; empty if it has passed."""
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
    landed = [round_ for round_ in soak.run_audit.rounds.applied if peer in round_.applied]
    if not landed:
        return "none"
    last = max(landed, key=lambda round_: round_.t)
    return f"round {last.round} of lineage {last.lineage[:8]}"
