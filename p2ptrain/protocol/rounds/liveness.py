"""Which voters and members are live, according to one peer's links and their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.deciding.proof import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import PeerId

# Peers remembered that have left; bounded, as identities are free.
MAX_DEPARTED = 4096


class Liveness:
    """Queries about peers.

    Args:
        own: our peer id and incarnation.
        trainers: the live peers of our lineage that hold its state.
    """

    def __init__(self, own: Voter, links: Links, trainers: Callable[[], Sequence[PeerId]]) -> None:
        self.own = own
        self._links = links
        self._trainer_ids = trainers
        self._departed: dict[PeerId, None] = {}  # oldest first

    def note_departed(self, peer_id: PeerId) -> None:
        """A peer has sent Leave."""
        self._departed[peer_id] = None
        if len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    def note_linked(self, peer_id: PeerId) -> None:
        """A peer is linked, perhaps again."""
        self._departed.pop(peer_id, None)

    def present(self) -> set[Voter]:
        """Ourselves and the live trainers."""
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in self._trainers().items())}

    def beats(self) -> dict[PeerId, Beat]:
        """The last heartbeat of each live trainer."""
        return {peer_id: link.beat for peer_id, link in self._trainers().items() if link.beat is not None}

    def is_alone(self, head: Head) -> bool:
        """Whether no other peer can take part in the round after this head: no voter, and none that has landed it."""
        trainers = self._trainers()
        has_voter = any(peer_id in trainers for peer_id, _ in head.voters)
        return not has_voter and all(link.beat is None or link.beat.round < head.round for link in trainers.values())

    def is_anyone_behind(self, round_: int) -> bool:
        """Whether a live trainer has not landed this round yet, by its last heartbeat."""
        return any(beat.round < round_ for beat in self.beats().values())

    def _trainers(self) -> dict[PeerId, Link]:
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self._trainer_ids())
        return {peer_id: link for peer_id, link in links if link is not None}

    def is_linked(self, peer_id: PeerId) -> bool:
        return peer_id == self.own[0] or self._links.get(peer_id) is not None

    def round_trip_s(self) -> float:
        """The longest round trip to a linked peer."""
        return max((link.flow.rtt_s for link in self._links.live.values()), default=0.0)

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

    def is_gone_for_good(self, voter: Voter, lineage: str) -> bool:
        """Whether a voter of this lineage is not waited for: it has left, was restarted, or is in another one now."""
        peer_id, incarnation = voter
        if peer_id == self.own[0]:
            return voter != self.own
        link = self._links.get(peer_id)
        if link is None:
            return peer_id in self._departed
        elsewhere = link.beat is not None and link.beat.lineage not in ("", lineage)
        return peer_id in self._departed or link.hello.incarnation != incarnation or elsewhere
