"""Decides when to restart something that failed, and names a peer's incarnations. Pure.

An incarnation distinguishes restarts of a peer for other peers: it is a random text per process, and the number of the
node in the process. Votes belong to one node; the event log belongs to the process.
"""

from __future__ import annotations

from collections.abc import Sequence


class Restarts:
    """Counts restarts in a row (`count`).

    Args:
        after_s: seconds before the first restart, the second and so on. There are no more restarts than entries.
        healthy_s: the count returns to 0 after a run that took longer than this.
    """

    def __init__(self, after_s: Sequence[float], healthy_s: float) -> None:
        self.count = 0
        self._after_s = tuple(after_s)
        self._healthy_s = healthy_s

    def next_delay_s(self, lived_s: float) -> float | None:
        """Seconds to wait before restarting after a run of `lived_s`; None to give up."""
        if lived_s > self._healthy_s:
            self.count = 0
        if self.count == len(self._after_s):
            return None
        self.count += 1
        return self._after_s[self.count - 1]


def incarnation_of(process: str, number: int) -> str:
    """The incarnation of a process's node number `number`, from 0."""
    return f"{process}/{number}" if number else process


def process_of(incarnation: str) -> str:
    """The process part of an incarnation."""
    return incarnation.partition("/")[0]
