"""Which voters and members are live, by one peer's links and heartbeats, and for how long a quorum was missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.deciding import lineage
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.wire.messages import MAX_REACH, Beat, Head
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Peers remembered that have left; bounded, as identities are free.
MAX_DEPARTED = 4096
# Voters that fell silent are waited for this long, or three intervals.
QUORUM_LOST_S = 60.0
# A user is told that there are no rounds after this: a peer that is restarted at once comes back before.
TELL_AFTER_S = 5.0
# Peers that a line of the log names.
MOST_NAMED = 3


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
        has_voter = any(peer_id in links for peer_id, _ in head.voters)
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

    def reach(self, head: Head) -> int:
        """Number of voters, and of contributors to the last round, that we are linked with, including ourselves."""
        return min(MAX_REACH, sum(map(self.is_linked_as, _reachable(head))))

    def reaches(self, head: Head) -> dict[PeerId, int]:
        """`reach` of ourselves and, as they report it, of the live trainers."""
        # Nobody reaches a process that was restarted or has left.
        most = sum(not self.is_gone_for_good(voter, head.lineage) for voter in _reachable(head))
        others = {peer: min(beat.reach, most) for peer, beat in self.beats().items()}
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


def _reachable(head: Head) -> set[Voter]:
    """Whom a reach counts."""
    return head.contributors.union(head.voters)


class LineageWatch:
    """Measures since when a quorum of the head's voters was missing, and since when its lineage has ended."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._seen_s = 0.0
        self._ended_from_s: float | None = None
        self._told = False

    def reset(self, now: float) -> None:
        """Count from now: after a new head, or after this process was held up."""
        self._seen_s, self._ended_from_s, self._told = now, None, False

    def has_ended(self, head: Head) -> bool:
        """Whether the voters of this head are gone for good."""
        liveness = self._liveness
        return lineage.has_ended(
            head.voters, liveness.present(), lambda voter: liveness.is_gone_for_good(voter, head.lineage)
        )

    def why(self, head: Head, now: float) -> str:
        """Why the head's lineage does not go on, for the log."""
        missing = self._missing(head)
        if self.has_ended(head):
            return f"{missing} left, was restarted, or went on without us"
        return f"no word from {missing} for {now - self._seen_s:.0f} s"

    def tell(self, head: Head, patience_s: float, now: float) -> None:
        """Tell the user, once, that there are no rounds because voters are away. Call it after `is_our_turn`."""
        away_s = now - self._seen_s
        if self._told or away_s < TELL_AFTER_S:
            return
        self._told = True
        logger.info(
            "no rounds for now: too few of the peers that decide round %d can be reached (missing: %s); training goes "
            "on. If they do not come back within %.0f s, rounds go on without them",
            head.round + 1,
            self._missing(head),
            max(0.0, max(QUORUM_LOST_S, patience_s) - away_s),
        )

    def _missing(self, head: Head) -> str:
        present = self._liveness.present()
        missing = [
            shown(peer_id) if peer_id != self._liveness.own[0] else "this peer before its restart"
            for peer_id, incarnation in head.voters
            if (peer_id, incarnation) not in present
        ]
        more = f" and {len(missing) - MOST_NAMED} others" if len(missing) > MOST_NAMED else ""
        return ", ".join(missing[:MOST_NAMED]) + more

    def sees_quorum(self, head: Head, now: float) -> bool:
        """Whether a quorum of the head's voters is here. Call it every second, also while a round lands."""
        if is_seen := is_quorum(self._liveness.present(), head.voters):
            self.reset(now)
        return is_seen

    def is_our_turn(
        self,
        head: Head,
        patience_s: float,
        now: float,
        *,
        awaits: Callable[[], bool],
        takes_turns: Callable[[PeerId], bool],
    ) -> bool:
        """Whether the voters are gone, and it is our turn to begin a new lineage; call it every second.

        Args:
            awaits: as for `lineage.is_our_turn`; asked only without a quorum.
            takes_turns: whether a peer may begin one.
        """
        if self.sees_quorum(head, now):
            return False
        if not self.has_ended(head):
            self._ended_from_s = None
        elif self._ended_from_s is None:
            self._ended_from_s = now
        me, here = self._liveness.own[0], (head.lineage, head.round)
        at_head = [peer for peer, beat in self._liveness.beats().items() if (beat.lineage, beat.round) == here]
        return lineage.is_our_turn(
            ended_s=None if self._ended_from_s is None else now - self._ended_from_s,
            lost_s=now - self._seen_s,
            patience_s=max(QUORUM_LOST_S, patience_s),
            lower=sum(peer < me and takes_turns(peer) for peer in at_head),
            awaits=awaits(),
        )
