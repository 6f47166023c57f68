"""How often, and how soon, something that ended by itself is started again. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Restarts:
    """Counts the restarts in a row.

    Args:
        after_s: seconds before the first restart, the second and so on. After the last of them it is given up.
        healthy_s: what lived longer was a good one: counting begins anew after it.

    Attributes:
        count: restarts since the last good one.
    """

    def __init__(self, after_s: Sequence[float], healthy_s: float) -> None:
        self.count = 0
        self._after_s = tuple(after_s)
        self._healthy_s = healthy_s

    def next_delay_s(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start of what has lived for `lived_s`. None: give it up."""
        if lived_s > self._healthy_s:
            self.count = 0
        if self.count == len(self._after_s):
            return None
        self.count += 1
        return self._after_s[self.count - 1]
