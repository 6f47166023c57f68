"""When this peer announces that it is due, for whom it waits, and whom it calls for how long."""

from __future__ import annotations

import random
from collections import deque

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.events import Lead
from p2ptrain.protocol.rounds.deciding.lineage import is_fresh
from p2ptrain.protocol.rounds.deciding.policy import drawn
from p2ptrain.protocol.rounds.rotation import DUE_AGAIN_S, LeaderRotation
from p2ptrain.protocol.wire.messages import Due, Head

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


class Schedule:
    """Decides when we are due and how we lead; sends nothing."""

    def __init__(self, context: RoundContext, rotation: LeaderRotation, rng: random.Random) -> None:
        self._context = context
        self._rotation = rotation
        self._rng = rng
        self._join_delays_s: deque[float] = deque(maxlen=64)
        self._due_from_s = self._at_length_from_s = 0.0
        self._began_s = self._head_s = 0.0
        self._sent_s = 0.0
        self._sent_for = ("", -2, 0)
        self._called_s = self._delayed_until_s = 0.0

    def begin(self, now: float, *, same_lineage: bool) -> None:
        """After a new head."""
        self._began_s = self._began_s if same_lineage else now
        self._head_s = now

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

    def due(self, head: Head, attempts_failed: int, now: float, *, again: bool) -> Due | None:
        """The Due to send to all peers, including ourselves; None if we are not due or have just sent it.

        Args:
            again: whether to send it again after a while, which asks the next leader in the order to call.
        """
        this = (head.lineage, head.round, attempts_failed)
        has_sent = this == self._sent_for and (not again or now - self._sent_s <= DUE_AGAIN_S)
        if not self._context.exchange.round_due or has_sent:
            return None
        if this == self._sent_for:
            self._rotation.ask_for_next()
        self._sent_s, self._sent_for = now, this
        return Due(head.lineage, head.round + 1, self._rotation.counter)

    def is_ours_to_lead(self, head: Head, attempts_failed: int, now: float) -> bool:
        """Whether we lead the next attempt."""
        if self._context.run.is_pairwise and now - self._due_from_s < MEMBERS_PATIENCE_S:
            # Its only voter, who founded the run, may be far ahead of most.
            present = {peer_id for peer_id, _ in self._context.liveness.present()}
            if 2 * len(present & self._rotation.due_for(head)) < len(present):
                return False
        return self._rotation.is_ours(head, attempts_failed, now)

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
        called |= head.voter_ids.intersection(present)
        return Lead(
            tuple(called | {context.peer_id}),
            self.window_s() * 2 ** min(attempts_failed, MOST_DOUBLINGS),
            max(JOIN_GRACE_S, 2 * context.liveness.round_trip_s()),
            context.timeouts.attempt_s(),
            self._rotation.counter,
        )

    def note_join(self, now: float) -> None:
        """A Join has answered our Call, maybe too late: the next window is longer then."""
        self._join_delays_s.append(now - self._called_s)

    def note_led(self, now: float, *, timed_out: bool) -> None:
        """An attempt that we led has ended without a record. If it timed out, the next one gets more time."""
        if timed_out:
            self._context.timeouts.note_timed_out(now - self._called_s)
        self._delayed_until_s = now + self._rng.uniform(*LEADER_DELAY_S)

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
