"""When this peer announces that it is due, which peer leads the next attempt, and how long the joining window is."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import Collection, Mapping

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.events import Lead
from p2ptrain.protocol.rounds.deciding.lineage import is_fresh
from p2ptrain.protocol.rounds.deciding.policy import drawn
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S, PeerBackoff
from p2ptrain.protocol.rounds.deciding.voters import FEWEST_VOTERS, Voter, is_quorum
from p2ptrain.protocol.wire.messages import MAX_VOTERS, Due, Head
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Without a Call, announce it again: the next leader in the order may then call.
DUE_AGAIN_S = 3.0
# A peer that is alone delays a round by at most this for joiners that make progress. 124M parameters and a moment take
# 90 s at 100 Mbit/s, a quarter of an hour at 10 Mbit/s.
JOINERS_PATIENCE_S = 1000.0
# In a group, rounds wait this long for a joiner that a round has overtaken, doubled each time (guess). Then it has the
# state, or follows by the rounds' means, an eighth of the bytes.
OVERTAKEN_S, MAX_OVERTAKEN_S = 10.0, 60.0
# A peer that has begun a lineage for the last round of a run with pairwise steps waits this long for one other to
# follow: partners compare histories every 10 s.
FOLLOWERS_PATIENCE_S = 30.0
# A peer without a round that downloads another start's state calls none for this long at most (guess): 1.5 GB at
# 20 Mbit/s.
FOLLOWING_PATIENCE_S = 600.0
# In a run with pairwise steps the last round waits this long for half of the linked members to be due (guess).
MEMBERS_PATIENCE_S = 60.0
# A Join is sent by the end of the window; on a busy machine it may take this long to arrive (guess).
JOIN_GRACE_S = 0.5
# Two leaders that interrupted each other wait for different times before they call again.
LEADER_DELAY_S = (0.05, 0.3)
# Bounds of the joining window, which follows the delay of past Joins, and ends once all have joined. On a busy machine
# a snapshot of 25M parameters takes most of a second (measured).
MIN_WINDOW_S = 1.0
MAX_WINDOW_OF_INTERVAL = 0.1
WINDOW_MARGIN = 1.5
# The window doubles after each failed attempt at a round, at most this many times.
MOST_DOUBLINGS = 2
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


class Schedule:
    """Decides when we are due and when we lead; sends nothing.

    Attributes:
        counter: orders the candidates for the next attempt, whose own counter is higher.
        ignored: leaders whose Calls are ignored for a while.
    """

    def __init__(self, context: RoundContext, rng: random.Random) -> None:
        self.counter = 0
        self.ignored = PeerBackoff()
        self._context = context
        self._rng = rng
        self._due: dict[int, set[PeerId]] = {}
        self._leaders: deque[PeerId] = deque(maxlen=MAX_VOTERS)  # of the last rounds
        # With the time at which it was noted.
        self._counters: dict[PeerId, tuple[int, float]] = {}
        self._join_delays_s: deque[float] = deque(maxlen=64)
        self._due_from_s = self._at_length_from_s = self._in_turn_s = 0.0
        self._half_due_s: float | None = None  # since when half of the voters are due
        self._failed = 0  # attempts at this round
        self._began_s = self._head_s = 0.0
        self._sent_s = 0.0
        self._sent_for = ("", -2, 0)
        self._called_s = self._delayed_until_s = 0.0

    def begin(self, head: Head, now: float, *, same_lineage: bool) -> None:
        """After a new head: forget Dues of earlier rounds."""
        self.counter = 0
        self._counters = {}
        self._began_s = self._began_s if same_lineage else now
        self._head_s = now
        self._due = {n: due for n, due in self._due.items() if same_lineage and n > head.round}
        if head.commit is not None:
            self._leaders.append(head.commit.attempt.leader)
        self._half_due_s, self._failed = None, 0
        self._note_half_due(head, now)

    def skip(self, round_: int) -> None:
        """The round was skipped: forget its Dues."""
        self._due.pop(round_, None)
        self._half_due_s = None

    def note_time(self, now: float) -> None:
        """Call it every second: notes since when we are due, and at the run's length."""
        if not self._context.exchange.round_due or not self._due_from_s:
            self._due_from_s = now
        if not self._context.exchange.at_length or not self._at_length_from_s:
            self._at_length_from_s = now

    def at_length_for_s(self, now: float) -> float:
        """For how long only the run's last round has been missing."""
        return now - self._at_length_from_s

    def waits(self, head: Head, now: float, *, is_landing: bool) -> bool:
        """Whether to delay our next Call for peers that the round would overtake.

        A round changes the state that joiners download. A peer that is alone therefore waits while they make progress.
        A slow joiner must not delay other members: they wait only for one that rounds have overtaken, as it might never
        get the state, and for a voter of the last round that has not landed it (`is_landing`): its parts would be gone.
        The only voter of a round waits for peers that are one round behind, and one that has begun a lineage for those
        that follow it: without them, it would discard what they have learned since the last round.
        """
        exchange, host = self._context.exchange, self._context.host
        if not exchange.round_due:
            return False
        if self._context.run.is_pairwise and not host.lineage_peers() and self._context.links.trainers():
            # The one round of the run is not for us alone, because we have founded a lineage for it.
            return now - self._began_s < FOLLOWERS_PATIENCE_S
        if len(head.voters) == 1 and now - self._began_s < OVERTAKEN_S and self._has_followers(head):
            return True
        if exchange.at_length:
            return False
        if is_landing and now - self._head_s < OVERTAKEN_S:
            return True
        # The only voter has the mean at once. Without a wait it would call again before anybody else has landed it.
        if (
            len(head.voters) == 1
            and now - self._head_s < MAX_OVERTAKEN_S
            and any(beat.round == head.round - 1 for beat in self._context.liveness.beats().values())
        ):
            return True
        joiners = host.joiners()
        if not joiners:
            return False
        if self._context.liveness.is_alone(head):
            return now - self._due_from_s < JOINERS_PATIENCE_S
        times = max(joiners.values())
        return times > 0 and now - self._head_s < min(OVERTAKEN_S * 2 ** (times - 1), MAX_OVERTAKEN_S)

    def _has_followers(self, head: Head) -> bool:
        """Whether a linked trainer has landed the same round in another lineage, which it may leave for ours."""
        beats = [link.beat for link in self._context.links.trainers() if link.beat is not None]
        return any(beat.round == head.round and beat.lineage not in ("", head.lineage) for beat in beats)

    def may_hold_back(self, head: Head, now: float) -> bool:
        """Whether to keep out of a round while another start's state is downloaded: of the first, not for ever."""
        return is_fresh(head, self._context.run) and now - self._due_from_s < FOLLOWING_PATIENCE_S

    def due(self, head: Head, attempts_failed: int, now: float) -> Due | None:
        """The Due to send to all peers, including ourselves; None if we are not due or have just sent it.

        Sent again, it asks the next leader in the order to call.
        """
        this = (head.lineage, head.round, attempts_failed)
        if not self._context.exchange.round_due or (this == self._sent_for and now - self._sent_s <= DUE_AGAIN_S):
            return None
        self.counter += this == self._sent_for
        self._sent_s, self._sent_for = now, this
        return Due(head.lineage, head.round + 1, self.counter)

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
        due = self._due.get(head.round + 1, set())
        if self._half_due_s is None and 2 * sum(peer in due for peer, _ in head.voters) >= len(head.voters):
            self._half_due_s = now

    def is_ours_to_lead(self, head: Head, now: float) -> bool:
        """Whether we lead the next attempt."""
        due = self._due.get(head.round + 1, set())
        if not due:
            return False  # Checked first, because the rest is slow with many links.
        liveness, ignored = self._context.liveness, self.passed_over(head, now)
        present = {voter for voter in liveness.present() if voter[0] not in ignored}
        # With pairwise steps its only voter, who founded the run, may be far ahead of most.
        few = self._context.run.is_pairwise and 2 * len(due) < len(present)
        if few and now - self._due_from_s < MEMBERS_PATIENCE_S:
            return False
        leads = leader_of(
            head, self.counter, due, present, liveness.reaches(head), () if self._is_late(now) else self._barred(head)
        )
        return leads == self._context.peer_id

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

    def delay_s(self, now: float) -> float:
        """How long to wait before we lead."""
        return max(0.0, self._delayed_until_s - now)

    def lead(self, head: Head, attempts_failed: int, now: float) -> Lead:
        """The attempt to lead now: of the voters, and of the peers that are drawn for this round.

        After each attempt that failed, the window is twice as long: on a busy machine snapshots may take seconds.
        """
        self._called_s = now
        context = self._context
        present = (*context.host.lineage_peers(), context.peer_id)
        called = set(drawn(head.state_hash, present, context.run.max_contributors))
        called |= {voter for voter, _ in head.voters}.intersection(present)
        return Lead(
            tuple(called | {context.peer_id}),
            self.window_s() * 2 ** min(attempts_failed, MOST_DOUBLINGS),
            max(JOIN_GRACE_S, 2 * context.liveness.round_trip_s()),
            context.timeouts.attempt_s(),
            self.counter,
        )

    def note_join(self, now: float) -> None:
        """A Join has answered our Call, maybe too late: the next window is longer then."""
        self._join_delays_s.append(now - self._called_s)

    def note_led(self, now: float, *, timed_out: bool) -> None:
        """An attempt that we led has ended without a record. If it timed out, the next one gets more time."""
        if timed_out:
            self._context.timeouts.note_timed_out(now - self._called_s)
        self._delayed_until_s = now + self._rng.uniform(*LEADER_DELAY_S)

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

    def window_s(self) -> float:
        """The joining window of an attempt that we lead: 1.5 × the longest recent delay of a Join, within bounds."""
        step_s = self._context.exchange.step_s
        interval_s = self._context.run.sync_every * step_s
        delay_s = WINDOW_MARGIN * max(self._join_delays_s, default=interval_s)
        # Peers join after their next step, and on a GPU after one more: room for two steps of the slowest, at most four
        # times ours.
        speeds = [beat.speed for beat in self._context.liveness.beats().values()]
        slowest_s = max((1 / speed for speed in speeds if speed > 0), default=0.0)
        room_s = 2.5 * min(max(slowest_s, step_s), 4 * step_s)
        return max(MIN_WINDOW_S, room_s, min(delay_s, MAX_WINDOW_OF_INTERVAL * interval_s))
