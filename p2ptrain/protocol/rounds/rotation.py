"""Whose turn it is to lead the next attempt, and whose Calls are followed: `deciding.leading`, over time."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding import leading
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S, PeerBackoff
from p2ptrain.protocol.rounds.deciding.voters import FEWEST_VOTERS, Voter, is_quorum
from p2ptrain.protocol.wire.messages import Due, Entry, Head
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Without a Call, peers announce again that they are due: the next leader in the order may then call.
DUE_AGAIN_S = 3.0
# What a peer asks for in Dues that follow each other faster is not heard.
MIN_DUE_GAP_S = DUE_AGAIN_S / 2
# A fast peer may be due again before the last round has landed here.
MAX_ROUNDS_AHEAD = 2
# After so many attempts at a round have failed, anybody may lead: its leaders may be too slow, or known to too few.
ANYBODY_AFTER_FAILED = 2
# A Due may name a later attempt than we know of, within this limit.
MAX_DUE_AHEAD = 8


class LeaderRotation:
    """Decides whose turn it is to lead the next attempt, from Dues and attempts that ended.

    Attributes:
        counter: orders the candidates for the next attempt, whose own counter is higher.
    """

    def __init__(self, context: RoundContext) -> None:
        self.counter = 0
        self._context = context
        self._backoff = PeerBackoff()  # leaders
        self._due: dict[int, set[PeerId]] = {}  # by round
        # What each voter asked for last, and when.
        self._asked: dict[PeerId, tuple[int, float]] = {}
        self._barred: frozenset[PeerId] = frozenset()
        self._half_due_s: float | None = None  # since when half of the voters are due
        self._in_turn_s = -math.inf  # when the last attempt ended whose leader was not barred

    def begin(self, head: Head, entries: Sequence[Entry], *, same_lineage: bool) -> None:
        """After a new head, where the history has these entries: forget Dues of earlier rounds."""
        self.counter = 0
        self._asked = {}
        self._due = {n: due for n, due in self._due.items() if same_lineage and n > head.round}
        self._barred = leading.barred(head, entries)
        self._half_due_s, self._in_turn_s = None, -math.inf

    def skip(self, round_: int) -> None:
        """The round was skipped: forget its Dues."""
        self._due.pop(round_, None)
        self._half_due_s = None

    # Dues.

    def due_for(self, head: Head) -> set[PeerId]:
        """The peers that are due for the round after `head`."""
        return self._due.get(head.round + 1, set())

    def note_due(self, sender: PeerId, due: Due, head: Head, now: float) -> bool:
        """Record that a peer is due. Returns whether that is for our round or one soon after."""
        if due.lineage != head.lineage or not 0 < due.round - head.round <= MAX_ROUNDS_AHEAD:
            return False
        self._due.setdefault(due.round, set()).add(sender)
        self._note_half_due(head, now)
        # Where three vote, strangers are not heard.
        is_heard = len(head.voters) < FEWEST_VOTERS or sender in head.voter_ids
        asked_s = self._asked.get(sender, (0, -math.inf))[1]
        if is_heard and due.round == head.round + 1 and now - asked_s >= MIN_DUE_GAP_S:
            self._asked[sender] = due.counter, now
            self.counter = max(self.counter, min(self._asked_for(head), self.counter + MAX_DUE_AHEAD))
        return True

    def _asked_for(self, head: Head) -> int:
        """The latest attempt that half of the voters ask for: liars that know the order could else always lead.

        Of fewer than three voters, that two peers ask for, if there are two.
        """
        claims = sorted((counter for counter, _ in self._asked.values()), reverse=True)
        least = (len(head.voters) + 1) // 2
        if len(head.voters) < FEWEST_VOTERS:
            least = min(len(self._context.host.lineage_peers()), 2)
        return claims[least - 1] if 0 < least <= len(claims) else 0

    def _note_half_due(self, head: Head, now: float) -> None:
        linked = set(filter(self._context.liveness.is_linked_as, head.voters))
        if not leading.is_half_due(head, self.due_for(head), linked):
            self._half_due_s = None
        elif self._half_due_s is None:
            self._half_due_s = now

    def ask_for_next(self) -> None:
        """No Call has come: the leader of the attempt after it may call."""
        self.counter += 1

    # Turns.

    def is_ours(self, head: Head, attempts_failed: int, now: float) -> bool:
        """Whether it is our turn.

        Args:
            attempts_failed: at this round.
        """
        due = self.due_for(head)
        if not due:
            return False  # first, as the rest is slow with many links
        present = self._present(head, now)
        is_open = attempts_failed >= ANYBODY_AFTER_FAILED or self._is_late(head, now)
        barred = () if is_open else self._barred
        reaches = self._context.liveness.reaches(head, self._context.recent.peer_ids)
        return leading.leader_of(head, self.counter, due, present, reaches, barred) == self._context.peer_id

    def is_out_of_turn(
        self, leader: PeerId, head: Head, attempts_failed: int, now: float, followed: PeerId | None
    ) -> bool:
        """Whether to ignore a Call because another voter should lead.

        That is so for barred peers and those that do not vote, while we take part in the attempt of another voter. It
        is also so until `DUE_AGAIN_S` after that, or after half of the voters are due, while another voter reaches
        nearly as many. Otherwise they could lead every round, and keep newcomers out.

        Args:
            followed: the leader of the attempt that we take part in.
        """
        if attempts_failed >= ANYBODY_AFTER_FAILED:
            return False
        free = leading.free_voters(head, self._present(head, now), self._barred)
        ids = {peer for peer, _ in free}
        if followed in ids and leader not in ids:
            return True
        if self._is_late(head, now):
            return False
        reaches = self._context.liveness.reaches(head, self._context.recent.peer_ids)
        return leading.is_out_of_turn(leader, head, free, reaches)

    def _is_late(self, head: Head, now: float) -> bool:
        """Whether anybody may lead, as half of the voters have been due for long, and nobody in turn leads."""
        self._note_half_due(head, now)
        return self._half_due_s is not None and now - max(self._half_due_s, self._in_turn_s) >= DUE_AGAIN_S

    def note_called(self, counter: int) -> None:
        """A voter has called an attempt with this counter."""
        self.counter = max(self.counter, counter)

    def note_ended(self, leader: PeerId, head: Head, now: float) -> None:
        """The attempt of this leader has ended for us without an outcome."""
        if leader in head.voter_ids - self._barred:
            self._in_turn_s = now

    # Leaders whose Calls are ignored.

    def ignore(self, leader: PeerId, now: float) -> None:
        """Ignore the Calls of a leader for a while, as its attempts fail; never our own."""
        if leader != self._context.peer_id:
            logger.info("attempts led by %s fail; its calls are ignored for a while", leader)
            self._backoff.note(leader, now, SILENT_LEADER_S)

    def forgive(self, leader: PeerId) -> None:
        """An attempt of this leader was decided."""
        self._backoff.forget(leader)

    def ignored(self, head: Head, now: float) -> set[PeerId]:
        """The peers whose Calls are ignored now, as far as the other voters can hold the round without them."""
        backed_off = self._backoff.backed_off(now)
        if not backed_off:
            return set()  # first, as the rest is slow with many links
        ignored, left = set[PeerId](), self._context.liveness.present()
        for peer_id in backed_off:
            others = {voter for voter in left if voter[0] != peer_id}
            if len(others) == len(left) or is_quorum(others, head.voters):
                ignored, left = ignored | {peer_id}, others
        return ignored

    def _present(self, head: Head, now: float) -> set[Voter]:
        """The live peers of our lineage whose Calls are not ignored."""
        ignored = self.ignored(head, now)
        return {voter for voter in self._context.liveness.present() if voter[0] not in ignored}
