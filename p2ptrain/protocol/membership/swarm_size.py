"""Estimates how many peers a swarm has, from the announced records. Pure.

Anybody can announce peers that do not exist. So announced peers without a link are counted only by the share that
answered our first dial. Retries do not count, as they say nothing new.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

# How many keys the estimate needs, and how many dials it remembers.
MIN_COUNTED, DIALS_REMEMBERED = 4, 64
# The swarm's size has changed if a key's count differs from the mean by more than this many standard deviations.
CHANGED_SIGMAS = 3.0


class SwarmSize:
    """Counts records and dials. The records of a swarm are spread over `keys` keys.

    Attributes:
        estimate: the swarm's estimated size; 0 until enough keys are counted.
    """

    def __init__(self, keys: int) -> None:
        self.estimate = 0.0
        self._keys = keys
        self._counts: dict[int, int] = {}
        self._linked: dict[int, int] = {}
        self._agreed = 0  # lookups since the size has changed, or since we have joined
        self._reached: deque[bool] = deque(maxlen=DIALS_REMEMBERED)

    def note_count(self, key: int, count: int, linked: int) -> None:
        """Note that a key has `count` records, `linked` of them our own or of linked peers.

        If the swarm's size has changed, forget the counts of the other keys.
        """
        mean = self.records_per_key if self._counts else count
        if abs(count - mean) > CHANGED_SIGMAS * math.sqrt(max(1.0, mean)):
            self._counts.clear()
            self._linked.clear()
            self._agreed = 0
        self._counts[key], self._linked[key] = count, linked
        self._agreed += 1
        self._update()

    def note_dial(self, *, reached: bool) -> None:
        """Note that the first dial of an announced peer has ended. A dial that was cut short has not reached it."""
        self._reached.append(reached)
        self._update()

    def settle(self) -> None:
        """Note that we have joined: earlier counts do not show that the size is steady."""
        self._agreed = 0

    @property
    def is_counted(self) -> bool:
        """Whether enough keys are counted."""
        return len(self._counts) >= MIN_COUNTED

    @property
    def records_per_key(self) -> float:
        """The mean number of records of the counted keys. At least one must be counted."""
        return fmean(self._counts.values())

    @property
    def steady(self) -> int:
        """For how many lookups the size has been the same, beyond those that an estimate needs."""
        return self._agreed - MIN_COUNTED

    def _update(self) -> None:
        if self.is_counted:
            linked, share = fmean(self._linked.values()), fmean(self._reached or [False])
            self.estimate = self._keys * (linked + share * (self.records_per_key - linked))
