"""A token bucket: a rate of bytes that may be exceeded for a moment. Pure: the time is an argument."""

from __future__ import annotations


class TokenBucket:
    """Allows `rate` bytes a second, and `burst` bytes at once after a pause.

    Takers may go into debt: each is told how long to wait before its bytes fit the rate, in the order of the calls.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, size_bytes: int, now: float) -> float:
        """Take bytes, and return the seconds to wait before they are sent."""
        self._level = min(self._burst, self._level + (now - self._at) * self._rate) - size_bytes
        self._at = now
        return max(0.0, -self._level / self._rate)
