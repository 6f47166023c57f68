"""When to restart something that ended by itself, and when to give it up. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Restarts:
    """Counts restarts in a row (`count`).

    Args:
        after_s: seconds before the first restart, the second and so on; no restart follows the last.
        healthy_s: the count returns to 0 after a run of more than this.
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
