"""Which voters and members are live, according to one peer's links and their heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.quorum import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import PeerId


class Peers(Protocol):
    """The live peers, according to the node."""

    def trainers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        ...

    def joiners(self) -> Sequence[PeerId]:
        """Live peers that are downloading the state."""
        ...

    def departed(self, peer_id: PeerId) -> bool:
        """Whether a peer has sent Leave."""
        ...


class Liveness:
    """Stateless queries. `own` is our peer id and incarnation."""

    def __init__(self, own: Voter, links: Links, peers: Peers) -> None:
        self.own = own
        self._links = links
        self.peers = peers

    def present(self) -> set[Voter]:
        """Ourselves and the live trainers."""
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self.peers.trainers())
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in links if link is not None)}

    def beats(self) -> dict[PeerId, Beat]:
        """The last heartbeat of each live trainer."""
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self.peers.trainers())
        return {peer_id: link.beat for peer_id, link in links if link is not None and link.beat is not None}

    def is_linked(self, peer_id: PeerId) -> bool:
        return peer_id == self.own[0] or self._links.get(peer_id) is not None

    def alone(self) -> bool:
        """Whether no other trainer is live."""
        return not self.peers.trainers()

    def round_trip_s(self) -> float:
        """The longest round trip to a linked peer."""
        return max((link.rtt_s for link in self._links.live.values()), default=0.0)

    def reach(self, head: Head) -> int:
        """Number of voters that we are linked with, including ourselves. Computed for every beat, so it is cheap."""
        live = self._links.live
        return sum(
            voter == self.own or ((link := live.get(voter[0])) is not None and link.hello.incarnation == voter[1])
            for voter in head.voters
        )

    def reaches(self, head: Head) -> dict[PeerId, int]:
        """`reach` of ourselves and, as they report it, of the live trainers."""
        others = {peer: min(beat.reach, len(head.voters)) for peer, beat in self.beats().items()}
        return {self.own[0]: self.reach(head), **others}

    def is_gone_for_good(self, voter: Voter) -> bool:
        """Whether a voter has left or was restarted, and so can never vote again."""
        peer_id, incarnation = voter
        if peer_id == self.own[0]:
            return voter != self.own
        link = self._links.get(peer_id)
        return self.peers.departed(peer_id) or (link is not None and link.hello.incarnation != incarnation)

    def stands_at(self, peer_id: PeerId, head: Head) -> bool:
        """Whether a peer (or we) is at this head."""
        beat = self.beats().get(peer_id)
        here = (head.lineage, head.round)
        return peer_id == self.own[0] or (beat is not None and (beat.lineage, beat.round) == here)
