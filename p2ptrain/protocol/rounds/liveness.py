"""Who of a round's voters and members is there, as one peer sees it through its links and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.quorum import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import PeerId


class Peers(Protocol):
    """Who is there, as the node sees it."""

    def trainers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        ...

    def joiners(self) -> Sequence[PeerId]:
        """Live peers that are taking over the state now."""
        ...

    def departed(self, peer_id: PeerId) -> bool:
        """Whether a peer said that it leaves."""
        ...


class Liveness:
    """Asks; remembers nothing.

    Attributes:
        own: ourselves, by peer id and incarnation.
    """

    def __init__(self, own: Voter, links: Links, peers: Peers) -> None:
        self.own = own
        self._links = links
        self._peers = peers

    def present(self) -> set[Voter]:
        """Ourselves and the live trainers."""
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self._peers.trainers())
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in links if link is not None)}

    def beats(self) -> dict[PeerId, Beat]:
        """What each live trainer said last."""
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self._peers.trainers())
        return {peer_id: link.beat for peer_id, link in links if link is not None and link.beat is not None}

    def is_linked(self, peer_id: PeerId) -> bool:
        return peer_id == self.own[0] or self._links.get(peer_id) is not None

    def alone(self) -> bool:
        """Whether nobody else of our lineage is there."""
        return not self._peers.trainers()

    def joiners(self) -> Sequence[PeerId]:
        """Live peers that are taking over the state now."""
        return self._peers.joiners()

    def trainers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        return self._peers.trainers()

    def round_trip_s(self) -> float:
        """The longest round trip to a partner."""
        return max((link.rtt_s for link in self._links.live.values()), default=0.0)

    def reach(self, head: Head) -> int:
        """How many voters we are linked with, ourselves included. Told with every beat, so it is cheap."""
        live = self._links.live
        return sum(
            voter == self.own or ((link := live.get(voter[0])) is not None and link.hello.incarnation == voter[1])
            for voter in head.voters
        )

    def reaches(self, head: Head) -> dict[PeerId, int]:
        """`reach` of ourselves and, by their own word, of the live trainers."""
        others = {peer: min(beat.reach, len(head.voters)) for peer, beat in self.beats().items()}
        return {self.own[0]: self.reach(head), **others}

    def is_gone_for_good(self, voter: Voter) -> bool:
        """Whether a voter said that it leaves, or was started anew: its vote can come from nowhere any more."""
        peer_id, incarnation = voter
        if peer_id == self.own[0]:
            return voter != self.own
        link = self._links.get(peer_id)
        return self._peers.departed(peer_id) or (link is not None and link.hello.incarnation != incarnation)

    def stands_at(self, peer_id: PeerId, head: Head) -> bool:
        """Whether a peer, or we, stand at this head."""
        beat = self.beats().get(peer_id)
        here = (head.lineage, head.round)
        return peer_id == self.own[0] or (beat is not None and (beat.lineage, beat.round) == here)
