"""Fragments that wait for the next step, bounded in number and bytes; and what became of those before."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from p2ptrain.protocol.exchange.types import Arrival

# Fragments waiting for the next step, and their bytes. 64 partners at one fragment a step; beyond that the oldest are
# dropped. The largest fragment has 4 MiB on the wire, 16 MiB here (guess).
MAX_INBOX = 64
MAX_INBOX_BYTES = 256 * 1024 * 1024
# Of these at most so many wait of one sender; two peers in step send each other one a step, but not evenly.
MAX_WAITING_PER_SENDER = 2


class Inbox:
    """Filled on the node's side, emptied by the training thread. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Arrival] = deque()
        self._bytes = 0
        self._dropped: Counter[str] = Counter()
        self._merged_total = 0
        self._age_steps_total = 0.0
        self._skipped_total: Counter[str] = Counter()

    def put(self, arrival: Arrival) -> None:
        """Queue a fragment; the oldest is dropped when there is no room. One always fits."""
        with self._lock:
            self._append([arrival])

    def count_skipped(self, reason: str, n: int) -> None:
        """Count a fragment that was refused before it came here."""
        with self._lock:
            self._dropped[reason] += n

    def take(self) -> tuple[list[Arrival], Counter[str]]:
        """All that wait, oldest first, and how many were skipped since the last call, by reason."""
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
        """What became of the fragments that were taken: some wait on, before those that came meanwhile.

        Args:
            held_back: those that wait on; of each sender the newest few do.
            merged: how many were merged, `age_steps` their ages in our steps, added up.
            skipped: how many were not, by reason.

        Returns:
            `skipped`, with those that do not wait on as they are too many.
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
        """Fragments merged and skipped by reason since the last call, and the mean age of the merged in our steps."""
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
    """The newest few of each sender: who sends faster than we step is not queued up without end."""
    newest: dict[str, deque[Arrival]] = {}
    counts = Counter(skipped)
    for arrival in waiting:
        queue = newest.setdefault(arrival.sender, deque(maxlen=MAX_WAITING_PER_SENDER))
        counts["superseded"] += len(queue) == MAX_WAITING_PER_SENDER
        queue.append(arrival)
    return [arrival for queue in newest.values() for arrival in queue], +counts
