"""Which voters and members are live, by one peer's links and heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.deciding.leading import reach_tolerance
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import PeerId

# Peers remembered that have left; bounded, as identities are free.
MAX_DEPARTED = 4096


class Liveness:
    """Queries about peers.

    Args:
        own: our peer id and incarnation.
        lineage_peers: the live peers of our lineage that hold its state.
    """

    def __init__(self, own: Voter, links: Links, lineage_peers: Callable[[], Sequence[PeerId]]) -> None:
        self.own = own
        self._links = links
        self._lineage_peers = lineage_peers
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
        """Ourselves and the live peers of our lineage."""
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in self._lineage_links().items())}

    def beats(self) -> dict[PeerId, Beat]:
        """The last heartbeat of each live peer of our lineage."""
        return {peer_id: link.beat for peer_id, link in self._lineage_links().items() if link.beat is not None}

    def is_alone(self, head: Head) -> bool:
        """Whether no other peer can take part in the round after this head: no voter, and none that has landed it."""
        links = self._lineage_links()
        has_voter = not head.voter_ids.isdisjoint(links)
        return not has_voter and all(link.beat is None or link.beat.round < head.round for link in links.values())

    def behind(self, round_: int) -> list[Link]:
        """The live peers of our lineage that have not landed this round yet, by their last heartbeats."""
        return [link for link in self._lineage_links().values() if link.beat is not None and link.beat.round < round_]

    def _lineage_links(self) -> dict[PeerId, Link]:
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self._lineage_peers())
        return {peer_id: link for peer_id, link in links if link is not None}

    def is_linked(self, peer_id: PeerId) -> bool:
        return peer_id == self.own[0] or self._links.get(peer_id) is not None

    def is_linked_as(self, voter: Voter) -> bool:
        """Whether we are this incarnation of a peer, or linked with it. Called for every beat, so it is cheap."""
        link = self._links.live.get(voter[0])
        return voter == self.own or (link is not None and link.hello.incarnation == voter[1])

    def round_trip_s(self) -> float:
        """The longest round trip to a linked peer of our lineage."""
        return max((link.flow.rtt_s for link in self._lineage_links().values()), default=0.0)

    def reach(self, head: Head, recent: Collection[PeerId]) -> int:
        """Number of voters, and of contributors to the last round, that we are linked with, including ourselves.

        Others that contributed to one of the last rounds (`recent`) count up to `reach_tolerance`: a peer that only one
        of several members can reach misses the rounds that others lead.
        """
        counted = head.contributors.union(head.voters)
        others = filter(self.is_linked, set(recent).difference(peer_id for peer_id, _ in counted))
        return sum(map(self.is_linked_as, counted)) + sum(1 for _ in islice(others, reach_tolerance(head)))

    def reaches(self, head: Head, recent: Collection[PeerId]) -> dict[PeerId, int]:
        """`reach` of ourselves and, as they report it, of the live trainers: at most what we believe."""
        # Nobody reaches a process that was restarted or has left. A leader may have made up those whom we do not see.
        voters = sum(not self.is_gone_for_good(voter, head.lineage) for voter in head.voters)
        others = {*recent, *(peer_id for peer_id, _ in head.contributors)} - head.voter_ids
        linked = sum(map(self.is_linked, others))
        most = voters + linked + min(reach_tolerance(head), len(others) - linked)
        reported = {peer: min(beat.reach, most) for peer, beat in self.beats().items()}
        return {self.own[0]: min(self.reach(head, recent), most), **reported}

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
