"""Who of a round's voters and members is there, as one peer sees it through its links and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.ballot import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import PeerId


class PresenceHost(Protocol):
    """What this needs of its node."""

    peer_id: PeerId
    incarnation: str
    links: Links

    def trainers(self) -> Sequence[PeerId]: ...

    def departed(self, peer_id: PeerId) -> bool: ...


class Presence:
    """Asks; remembers nothing."""

    def __init__(self, host: PresenceHost) -> None:
        self._host = host

    @property
    def own(self) -> Voter:
        """Ourselves, by peer id and incarnation."""
        return self._host.peer_id, self._host.incarnation

    def present(self) -> set[Voter]:
        """Ourselves and the live trainers."""
        links = ((peer_id, self._host.links.get(peer_id)) for peer_id in self._host.trainers())
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in links if link is not None)}

    def beats(self) -> dict[PeerId, Beat]:
        """What each live trainer said last."""
        links = ((peer_id, self._host.links.get(peer_id)) for peer_id in self._host.trainers())
        return {peer_id: link.beat for peer_id, link in links if link is not None and link.beat is not None}

    def is_linked(self, peer_id: PeerId) -> bool:
        return peer_id == self._host.peer_id or self._host.links.get(peer_id) is not None

    def reach(self, head: Head) -> int:
        """How many voters we are linked with, ourselves included. Told with every beat, so it is cheap."""
        live = self._host.links.live
        return sum(
            voter == self.own or ((link := live.get(voter[0])) is not None and link.hello.incarnation == voter[1])
            for voter in head.voters
        )

    def reaches(self, head: Head) -> dict[PeerId, int]:
        """`reach` of ourselves and, by their own word, of the live trainers."""
        return {self._host.peer_id: self.reach(head), **{peer: beat.reach for peer, beat in self.beats().items()}}

    def is_gone_for_good(self, voter: Voter) -> bool:
        """Whether a voter said that it leaves, or was started anew: its vote can come from nowhere any more."""
        peer_id, incarnation = voter
        if peer_id == self._host.peer_id:
            return voter != self.own
        link = self._host.links.get(peer_id)
        return self._host.departed(peer_id) or (link is not None and link.hello.incarnation != incarnation)

    def stands_at(self, peer_id: PeerId, head: Head) -> bool:
        """Whether a peer, or we, stand at this head."""
        beat = self.beats().get(peer_id)
        here = (head.lineage, head.round)
        return peer_id == self._host.peer_id or (beat is not None and (beat.lineage, beat.round) == here)
