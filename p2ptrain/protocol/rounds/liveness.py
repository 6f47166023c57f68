"""Which voters and members are live, according to one peer's links and their heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import RoundReport
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.quorum import Voter
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig


class RoundHost(Protocol):
    """The parts of a node that its rounds use."""

    peer_id: PeerId
    incarnation: str
    run: RunConfig
    links: Links
    state: AnchorState
    compute: Compute

    def trainers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        ...

    def joiners(self) -> Sequence[PeerId]:
        """Live peers that are downloading the state."""
        ...

    def departed(self, peer_id: PeerId) -> bool:
        """Whether a peer has sent Leave."""
        ...

    def round_ended(self, report: RoundReport) -> None: ...

    def fall_behind(self, reason: str) -> None:
        """This peer cannot follow by records any more: replace the whole state."""
        ...


class Liveness:
    """Stateless queries. `own` is our peer id and incarnation."""

    def __init__(self, host: RoundHost) -> None:
        self.own: Voter = (host.peer_id, host.incarnation)
        self._host = host
        self._links = host.links

    def present(self) -> set[Voter]:
        """Ourselves and the live trainers."""
        return {self.own, *((peer_id, link.hello.incarnation) for peer_id, link in self._trainers().items())}

    def beats(self) -> dict[PeerId, Beat]:
        """The last heartbeat of each live trainer."""
        return {peer_id: link.beat for peer_id, link in self._trainers().items() if link.beat is not None}

    def _trainers(self) -> dict[PeerId, Link]:
        links = ((peer_id, self._links.get(peer_id)) for peer_id in self._host.trainers())
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

    def is_gone_for_good(self, voter: Voter) -> bool:
        """Whether a voter has left or was restarted, and so can never vote again."""
        peer_id, incarnation = voter
        if peer_id == self.own[0]:
            return voter != self.own
        link = self._links.get(peer_id)
        return self._host.departed(peer_id) or (link is not None and link.hello.incarnation != incarnation)
