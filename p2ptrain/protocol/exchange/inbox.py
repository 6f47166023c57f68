"""Fragments queued for the next step, bounded in number and bytes, and counts of merged and skipped ones."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from p2ptrain.protocol.exchange.types import Arrival

# Queued fragments and their bytes, enough for one a step of 64 peers (guess). If there are more, the oldest are
# dropped. The largest fragment has 4 MiB on the wire, and 16 MiB here.
MAX_INBOX = 64
MAX_INBOX_BYTES = 256 * 1024 * 1024
# Fragments of one sender that a step holds back for later ones. Two peers of equal speed send each other one a step, at
# uneven times.
MAX_WAITING_PER_SENDER = 2
# Queued fragments of one sender: one for the next step, and those that it may hold back. So a sender that floods does
# not take the places of others.
MAX_QUEUED_PER_SENDER = MAX_WAITING_PER_SENDER + 1


class Inbox:
    """Filled by the node, emptied by the training thread. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Arrival] = deque()
        self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._merged_total = 0
        self._age_steps_total = 0.0
        self._skipped_total: Counter[str] = Counter()

    def put(self, arrival: Arrival) -> None:
        """Queue a fragment for the next step. If there is no room, drop the sender's oldest, else the oldest of all."""
        with self._lock:
            same = [other for other in self._waiting if other.sender == arrival.sender]
            if len(same) >= MAX_QUEUED_PER_SENDER:
                self._waiting = deque(other for other in self._waiting if other is not same[0])
                self._bytes -= same[0].values.nbytes
                self._dropped["superseded"] += 1
            self._append([arrival])

    def count_skipped(self, reason: str) -> None:
        """Count a fragment that was skipped before it was queued."""
        with self._lock:
            self._dropped[reason] += 1

    def take(self) -> tuple[list[Arrival], Counter[str]]:
        """All queued fragments, oldest first, and how many were skipped since the last call, by reason."""
        if not self._waiting and not self._dropped:
            return [], Counter()
        with self._lock:
            arrivals, dropped = list(self._waiting), self._dropped
            self._waiting.clear()
            self._bytes, self._dropped = 0, Counter()
        return arrivals, dropped

    def settle(
        self, held_back: Sequence[Arrival], merged: int, skipped: Mapping[str, int], age_steps: float
    ) -> dict[str, int]:
        """Record the result of a step, and queue again what it held back, before what arrived meanwhile.

        Args:
            held_back: the newest few of each sender are queued again.
            merged: number of merged fragments. `age_steps` is the sum of their ages in our steps.
            skipped: number of skipped fragments, by reason.

        Returns:
            `skipped`, plus those that were held back and are not queued again.
        """
        kept, all_skipped = _newest(held_back, skipped)
        with self._lock:
            newer = list(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            self._append([*kept, *newer])
            self._merged_total += merged
            self._age_steps_total += age_steps
            self._skipped_total.update(all_skipped)
        return dict(all_skipped)

    def take_counts(self) -> tuple[int, dict[str, int], float]:
        """Since the last call: fragments merged, skipped by reason, and the mean age of merged ones in our steps."""
        with self._lock:
            merged, skipped, age_steps = self._merged_total, dict(self._skipped_total), self._age_steps_total
            self._merged_total, self._skipped_total, self._age_steps_total = 0, Counter(), 0.0
        return merged, skipped, age_steps / merged if merged else 0.0

    def _append(self, arrivals: Sequence[Arrival]) -> None:
        self._waiting.extend(arrivals)
        self._bytes += sum(arrival.values.nbytes for arrival in arrivals)
        while len(self._waiting) > MAX_INBOX or (len(self._waiting) > 1 and self._bytes > MAX_INBOX_BYTES):
            self._bytes -= self._waiting.popleft().values.nbytes
            self._dropped["inbox_full"] += 1


def _newest(waiting: Sequence[Arrival], skipped: Mapping[str, int]) -> tuple[list[Arrival], Counter[str]]:
    """The newest few of each sender, as some may send faster than we step."""
    newest: dict[str, deque[Arrival]] = {}
    counts = Counter(skipped)
    for arrival in waiting:
        queue = newest.setdefault(arrival.sender, deque(maxlen=MAX_WAITING_PER_SENDER))
        counts["superseded"] += len(queue) == MAX_WAITING_PER_SENDER
        queue.append(arrival)
    return [arrival for queue in newest.values() for arrival in queue], +counts
