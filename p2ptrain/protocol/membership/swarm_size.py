"""An estimate of how many peers a swarm has, from the peers that are announced. Pure.

Anybody can announce peers that do not exist. So those that we are not linked with count by the share of them that we
reached when we dialled them for the first time: a retry says nothing new.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

# The estimate needs so many keys; it remembers so many dials.
MIN_COUNTED, DIALS_REMEMBERED = 4, 64
# If a key's count differs from the mean by more than this many standard deviations, the swarm's size has changed.
CHANGED_SIGMAS = 3.0


class SwarmSize:
    """Counts records and dials. The records of a swarm are spread over `keys` keys.

    Attributes:
        estimate: of the swarm's size; 0 until enough is counted.
    """

    def __init__(self, keys: int) -> None:
        self.estimate = 0.0
        self._keys = keys
        self._counts: dict[int, int] = {}
        self._linked: dict[int, int] = {}
        self._agreed = 0  # lookups since the size has changed, or since we have joined
        self._reached: deque[bool] = deque(maxlen=DIALS_REMEMBERED)

    def note_count(self, key: int, count: int, linked: int) -> None:
        """A key has so many records that count, so many of them of peers that we are linked with, or our own.

        If the swarm's size has changed, forget what the other keys had.
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
        """The first dial of an announced peer has ended. One that was cut short has reached nobody yet."""
        self._reached.append(reached)
        self._update()

    def settle(self) -> None:
        """We have joined: what was counted before does not show that the size stays the same."""
        self._agreed = 0

    @property
    def is_counted(self) -> bool:
        """Whether enough keys are counted for an estimate."""
        return len(self._counts) >= MIN_COUNTED

    @property
    def records_per_key(self) -> float:
        """The mean of the records of the keys counted. There must be one."""
        return fmean(self._counts.values())

    @property
    def steady(self) -> int:
        """For how many lookups, beyond those that an estimate needs, the size has been the same."""
        return self._agreed - MIN_COUNTED

    def _update(self) -> None:
        if self.is_counted:
            linked, share = fmean(self._linked.values()), fmean(self._reached or [False])
            self.estimate = self._keys * (linked + share * (self.records_per_key - linked))
