"""Counts the rules that each peer broke, for ten minutes. Pure: `now` is in seconds on any clock.

Strikes are counted per identity, whichever link or incarnation it was. Identities are free, so this stops faulty
software and the careless; what a stranger may do at all is bounded elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

# A peer with so many is refused until the first of them expires. Old software is excluded by the wire version.
MAX_STRIKES = 3
# Long enough that three strikes cost a flooder most of its time. Short enough that a peer that was repaired, or that
# met a bug of ours, comes back by itself (guess).
STRIKE_S = 600.0
# Peers whose strikes are remembered; the one struck first is forgotten.
MAX_STRUCK = 4096
# Of a reason, for logs and lists.
MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class Struck:
    """A peer with strikes: how many, the reason of the last one, safe to print, and how many seconds ago that was."""

    peer_id: PeerId
    count: int
    reason: str
    age_s: float


class Strikes:
    """The strikes that this peer has given."""

    def __init__(self) -> None:
        self._given: dict[PeerId, deque[float]] = {}
        self._reasons: dict[PeerId, str] = {}

    def add(self, peer_id: PeerId, reason: str, now: float, *, count: int = 1) -> int:
        """Give a peer a strike, or several at once. Returns how many it has now."""
        given = self._given.pop(peer_id, None) or deque(maxlen=MAX_STRIKES)
        given.extend([now] * count)
        self._given[peer_id], self._reasons[peer_id] = given, shown(reason, MAX_REASON)  # the last struck is last
        if len(self._given) > MAX_STRUCK:
            self._forget(next(iter(self._given)))
        return self.count(peer_id, now)

    def count(self, peer_id: PeerId, now: float) -> int:
        """The strikes of a peer that have not expired."""
        given = self._given.get(peer_id)
        while given and now - given[0] >= STRIKE_S:
            given.popleft()
        if not given:
            self._forget(peer_id)
            return 0
        return len(given)

    def counts(self, now: float) -> dict[PeerId, int]:
        """All peers with strikes, the last struck last."""
        counted = ((peer_id, self.count(peer_id, now)) for peer_id in list(self._given))
        return {peer_id: count for peer_id, count in counted if count}

    def latest(self, most: int, now: float) -> list[Struck]:
        """The peers struck last, the newest first."""
        return [
            Struck(peer_id, count, self._reasons[peer_id], now - self._given[peer_id][-1])
            for peer_id, count in reversed(self.counts(now).items())
        ][:most]

    def _forget(self, peer_id: PeerId) -> None:
        self._given.pop(peer_id, None)
        self._reasons.pop(peer_id, None)
