"""Which peer leads the next attempt, and whose Calls are followed."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Collection, Mapping

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S, PeerBackoff
from p2ptrain.protocol.rounds.deciding.voters import FEWEST_VOTERS, Voter, is_quorum
from p2ptrain.protocol.wire.messages import MAX_VOTERS, Due, Head
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Without a Call, peers announce again that they are due: the next leader in the order may then call.
DUE_AGAIN_S = 3.0
# The peer that reaches most voters leads; every third attempt may be led by any live peer.
ANY_LEADER_EVERY = 3
# A fast peer may be due again before the last round has landed here.
MAX_ROUNDS_AHEAD = 2
# After so many attempts at a round have failed, anybody may lead: its leaders may be too slow, or known to too few.
MOST_FAILED = 2
# A Due may name a later attempt than we know of, within this limit.
MAX_DUE_AHEAD = 8


def leader_of(
    head: Head,
    counter: int,
    due: Collection[PeerId],
    present: Collection[Voter],
    reach: Mapping[PeerId, int],
    barred: Collection[PeerId] = (),
) -> PeerId | None:
    """The peer that leads this attempt at the round after `head`; None until half of the voters are due.

    Candidates are ordered by a hash for each attempt: first voters that contributed to the last round, then other
    voters, then other peers.

    Args:
        present: linked live trainers, and ourselves.
        reach: how many voters each of them is linked with. Behind NAT a peer may not reach all, and voters that the
            leader does not reach cannot contribute.
        barred: leaders of the last rounds, who do not lead if other voters reach nearly as many.
    """
    due_voters = [voter for voter in head.voters if voter in present and voter[0] in due]
    if 2 * len(due_voters) < len(head.voters) or not is_quorum(present, head.voters):
        return None
    furthest = max(reach.get(peer, 0) for peer, _ in present)

    def reaching(least: int) -> list[Voter]:
        return [voter for voter in present if reach.get(voter[0], 0) >= least]

    def free(voters: Collection[Voter]) -> list[Voter]:
        return [voter for voter in voters if voter in head.voters and voter[0] not in barred]

    candidates: Collection[Voter] = present
    if counter % ANY_LEADER_EVERY != ANY_LEADER_EVERY - 1:
        candidates = reaching(furthest)
    if barred:
        candidates = free(candidates) or free(reaching(furthest - lesser_reach(head))) or candidates
    contributed = head.contributors

    def rank(voter: Voter) -> tuple[bool, bool, bytes]:
        name = f"{head.lineage}/{head.round + 1}/{counter}/{voter[0]}"
        order = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return voter not in head.voters, voter not in contributed, order

    return min(candidates, key=rank)[0]


def lesser_reach(head: Head) -> int:
    """By how many voters a reach may be less than another and count as much: it is a claim, and peers restart."""
    return (len(head.voters) - 1) // 3


class Turns:
    """Decides whose turn it is to lead the next attempt, from Dues and failed attempts.

    Attributes:
        counter: orders the candidates for the next attempt, whose own counter is higher.
        ignored: leaders whose Calls are ignored for a while.
    """

    def __init__(self, context: RoundContext) -> None:
        self.counter = 0
        self.ignored = PeerBackoff()
        self._context = context
        self._due: dict[int, set[PeerId]] = {}  # by round
        # With the time at which it was noted.
        self._counters: dict[PeerId, tuple[int, float]] = {}
        self._leaders: deque[PeerId] = deque(maxlen=MAX_VOTERS)  # of the last rounds
        self._half_due_s: float | None = None  # since when half of the voters are due
        self._in_turn_s = 0.0
        self._failed = 0  # attempts at this round

    def begin(self, head: Head, now: float, *, same_lineage: bool) -> None:
        """After a new head: forget Dues of earlier rounds."""
        self.counter = 0
        self._counters = {}
        self._due = {n: due for n, due in self._due.items() if same_lineage and n > head.round}
        if head.commit is not None:
            self._leaders.append(head.commit.attempt.leader)
        self._half_due_s, self._failed = None, 0
        self._note_half_due(head, now)

    def skip(self, round_: int) -> None:
        """The round was skipped: forget its Dues."""
        self._due.pop(round_, None)
        self._half_due_s = None

    def due(self, head: Head) -> set[PeerId]:
        """The peers that are due for the round after `head`."""
        return self._due.get(head.round + 1, set())

    def note_due(self, sender: PeerId, due: Due, head: Head, now: float) -> bool:
        """Record that a peer is due. Returns whether that is for our round or one soon after."""
        if due.lineage != head.lineage or not 0 < due.round - head.round <= MAX_ROUNDS_AHEAD:
            return False
        self._due.setdefault(due.round, set()).add(sender)
        self._note_half_due(head, now)
        noted_s = self._counters.get(sender, (0, -math.inf))[1]
        # Counters of a peer that sends Dues too often are ignored, and of strangers where three vote.
        few = len(head.voters) < FEWEST_VOTERS
        counts = few or any(sender == peer_id for peer_id, _ in head.voters)
        if counts and due.round == head.round + 1 and now - noted_s >= DUE_AGAIN_S / 2:
            self._counters[sender] = due.counter, now
            # Half of the voters must report a counter, or two peers, if there are two: liars that know the order could
            # else always lead.
            claims = sorted((counter for counter, _ in self._counters.values()), reverse=True)
            least = min(len(self._context.host.lineage_peers()), 2) if few else (len(head.voters) + 1) // 2
            heard = claims[least - 1 :][:1]
            self.counter = max(self.counter, *(min(claim, self.counter + MAX_DUE_AHEAD) for claim in heard), 0)
        return True

    def _note_half_due(self, head: Head, now: float) -> None:
        due = self.due(head)
        if self._half_due_s is None and 2 * sum(peer in due for peer, _ in head.voters) >= len(head.voters):
            self._half_due_s = now

    def is_ours(self, head: Head, now: float) -> bool:
        """Whether it is our turn."""
        due = self.due(head)
        if not due:
            return False  # Checked first, because the rest is slow with many links.
        liveness, ignored = self._context.liveness, self.passed_over(head, now)
        present = {voter for voter in liveness.present() if voter[0] not in ignored}
        barred = () if self._is_late(now) else self._barred(head)
        leader = leader_of(head, self.counter, due, present, liveness.reaches(head), barred)
        return leader == self._context.peer_id

    def _barred(self, head: Head) -> set[PeerId]:
        """The leaders of the last rounds, fewer than half of the voters: else one, or some in turn, could lead all."""
        # Two voters may take turns as they like: of them the first decides alone, and a silent one costs seconds.
        most = (len(head.voters) - 1) // 2
        return set(list(self._leaders)[-most:]) if most else set()

    def _is_late(self, now: float) -> bool:
        """Whether anybody may lead, as half of the voters are due for long, or those whose turn it is have failed."""
        if self._failed >= MOST_FAILED:
            return True
        return self._half_due_s is not None and now - max(self._half_due_s, self._in_turn_s) >= DUE_AGAIN_S

    def is_out_of_turn(self, leader: PeerId, head: Head, now: float, followed: PeerId | None) -> bool:
        """Whether to ignore a Call because another voter should lead.

        That is so for the last leaders and for peers that do not vote, while we take part in the attempt of another
        voter. It is also so until `DUE_AGAIN_S` after that, or after half of the voters are due, while another voter
        reaches nearly as many. Otherwise they could lead every round, and keep newcomers out.

        Args:
            followed: the leader of the attempt that we take part in.
        """
        may_lead = {peer for peer, _ in head.voters} - self._barred(head)
        if leader in may_lead:
            return False
        if followed in may_lead and self._failed < MOST_FAILED:
            self._in_turn_s = now
            return True
        if self._is_late(now):
            return False
        reaches, ignored = self._context.liveness.reaches(head), self.passed_over(head, now)
        least = reaches.get(leader, 0) - lesser_reach(head)
        return any(peer in may_lead and peer not in ignored and reach >= least for peer, reach in reaches.items())

    def note_failed(self) -> None:
        """An attempt at this round has ended for us without an outcome."""
        self._failed += 1

    def ignore(self, leader: PeerId, now: float) -> None:
        """Ignore the Calls of a leader for a while, as its attempts fail; never our own."""
        if leader != self._context.peer_id:
            logger.info("attempts led by %s keep failing; its calls are ignored for a while", leader)
            self.ignored.note(leader, now, SILENT_LEADER_S)

    def passed_over(self, head: Head, now: float) -> set[PeerId]:
        """The peers whose Calls are ignored now, as far as the other voters can hold the round without them."""
        backed_off = self.ignored.backed_off(now)
        if not backed_off:
            return set()  # Checked first, because the rest is slow with many links.
        ignored, left = set[PeerId](), self._context.liveness.present()
        for peer_id in backed_off:
            others = {voter for voter in left if voter[0] != peer_id}
            if len(others) == len(left) or is_quorum(others, head.voters):
                ignored, left = ignored | {peer_id}, others
        return ignored
