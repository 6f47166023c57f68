"""A token bucket limits a rate, but allows bursts. Pure: `now` is in seconds on any clock."""

from __future__ import annotations


class TokenBucket:
    """Allows `rate_per_s` per second on average, and `burst` at once after a pause."""

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self._burst = self._tokens = burst
        self._since_s = now

    def spend(self, cost: float, now: float) -> bool:
        """Take this many tokens. If there are fewer, take none and return False."""
        self._fill(now)
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def is_full(self, now: float) -> bool:
        """Whether a whole burst may be spent."""
        self._fill(now)
        return self._tokens >= self._burst

    def give_back(self, cost: float) -> None:
        """Return tokens that were spent."""
        self._tokens = min(self._burst, self._tokens + cost)

    def take(self, cost: float, now: float) -> float:
        """Take this many tokens, on credit if need be. Returns the seconds to wait until they fit the rate."""
        self._fill(now)
        self._tokens -= cost
        return max(0.0, -self._tokens / self.rate_per_s)

    def _fill(self, now: float) -> None:
        since_s, self._since_s = self._since_s, max(self._since_s, now)
        self._tokens = min(self._burst, self._tokens + self.rate_per_s * (self._since_s - since_s))
