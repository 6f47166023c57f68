"""Two processes with one identity, as after a machine was copied. Pure.

A process has one incarnation. A link of another one replaces its link, as after a restart. If it then comes back, it
was not restarted: both processes run, and each would displace the other without end. So the one that was replaced is
refused as long as the other is linked.
"""

from __future__ import annotations

from p2ptrain.protocol.wire.transport import PeerId

# Peers of which this is remembered, and incarnations of each; bounded, as identities are free.
MAX_PEERS, MAX_INCARNATIONS = 1024, 8


class Copies:
    """Which incarnations of peers were replaced, and of which peers the user was told."""

    def __init__(self) -> None:
        self._replaced: dict[PeerId, list[str]] = {}  # peers and incarnations, oldest first
        self._told: dict[PeerId, None] = {}

    def note_replaced(self, peer_id: PeerId, incarnation: str) -> None:
        """Another incarnation of a peer takes the place of this one."""
        replaced = self._replaced.pop(peer_id, [])
        self._replaced[peer_id] = [*replaced, incarnation][-MAX_INCARNATIONS:]
        if len(self._replaced) > MAX_PEERS:
            del self._replaced[next(iter(self._replaced))]

    def note_linked(self, peer_id: PeerId, incarnation: str) -> None:
        """This incarnation of a peer is linked, so it may link again."""
        if incarnation in (replaced := self._replaced.get(peer_id, [])):
            replaced.remove(incarnation)

    def is_copy(self, peer_id: PeerId, incarnation: str, linked: str) -> bool:
        """Whether a process runs beside the one that is `linked`, which has replaced it."""
        return linked != incarnation and incarnation in self._replaced.get(peer_id, [])

    def is_news(self, peer_id: PeerId) -> bool:
        """Whether the user was not told yet that a peer is a copy, and is told now."""
        is_new = peer_id not in self._told and len(self._told) < MAX_PEERS
        if is_new:
            self._told[peer_id] = None
        return is_new
