"""The round protocol at one peer: joins the consensus to links, clock, averaging and the training thread.

One driver per training peer. Messages come in through `deliver` and go to the consensus, or to the attempt that is
under way; the consensus's effects become messages and tasks. Tasks run in the driver's own nursery: one for each
attempt that we take part in, one for each that we lead, one for an outcome. Each ends by itself, and contains its
errors: an attempt costs that attempt, an outcome that cannot be taken costs falling behind.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.exchange.types import Epoch, Landing, RoundReport, Snapshot
from p2ptrain.protocol.faults import Faults
from p2ptrain.protocol.rounds import policy
from p2ptrain.protocol.rounds.attempts import Attempts
from p2ptrain.protocol.rounds.calling import Caller
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.events import (
    Average,
    Broadcast,
    Effect,
    Event,
    Fetch,
    LeaderEnded,
    LeaderFailed,
    Learned,
    Lost,
    MemberEnded,
    MemberFailed,
    Prepare,
    Send,
    Tick,
    Unproven,
)
from p2ptrain.protocol.rounds.lineage import LineageWatch, Places, new_lineage
from p2ptrain.protocol.rounds.liveness import Liveness, Peers
from p2ptrain.protocol.rounds.outcome import Outcomes, RoundEvents
from p2ptrain.protocol.rounds.round_state import State, begin, deadline_s
from p2ptrain.protocol.rounds.runner import ConsensusRunner
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.timeouts import SILENT_LEADER_S, Silences
from p2ptrain.protocol.wire.messages import (
    Abort,
    Accepted,
    Arrived,
    Call,
    Commit,
    Contribution,
    Due,
    Head,
    Inquire,
    Join,
    Message,
    Propose,
    Ready,
    Record,
    Reduce,
    Reduced,
    Refuse,
    Roster,
    Withdraw,
)
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Attempts at one round before it is skipped (guess).
MAX_ATTEMPTS = 3
# Calls and Commits that are kept while an outcome lands: the last of each kind from each peer.
MAX_DEFERRED = 64
# How often we look whether a round is due, where nothing happens that says so.
LOOK_S = 1.0
# How often we look who has stalled; when that is late by more, it was us, and by much more, we were paused.
STALL_POLL_S, HELD_UP_S, PAUSED_S = 0.25, 1.0, 10.0
# Two leaders that got into each other's way must not meet again.
REST_S = (0.05, 0.3)


class RoundDriver:
    """Owns the head and the state of the consensus. See the package docstring for who does what."""

    def __init__(
        self, context: RoundContext, peers: Peers, events: RoundEvents, faults: Faults, rng: random.Random
    ) -> None:
        self.context = context
        self.parts = context.parts
        self._events = events
        self._rng = rng
        self._exchange = context.exchange
        self._liveness = Liveness((context.peer_id, context.incarnation), context.links, peers)
        self._leaders, self._reducers = Silences(), Silences()
        self._in_vain: Counter[PeerId] = Counter()
        self._caller = Caller(context, self._liveness, self._leaders)
        self._lineage_watch = LineageWatch(self._liveness)
        self._taker = SnapshotTaker(
            context.run, context.exchange, context.state, context.links.counters, context.compute, faults
        )
        self._outcomes = Outcomes(context, self._taker, self._liveness, events, self.set_head, self._on_outcome_ended)
        no_head = Head("", "", -1, "", "", (), 0, 0, None)
        self._consensus = ConsensusRunner(self._begin(no_head), self._carry_out, self._wake, context.errors)
        self._attempts = Attempts(
            context, self._taker, self._reducers, fetch=self._fetch, tell=self.tell, apply=self._consensus.apply
        )
        self._places = Places()
        self._called_s = self._rest_until_s = 0.0
        self._attempts_failed = 0
        self._leaving = False
        self._deferred: dict[tuple[PeerId, type[Message]], Message] = {}
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        context.parts.accepted = lambda: self.round_state.acceptor.record
        context.exchange.on_due = self._wake
        context.exchange.on_snapshot = self._on_snapshot

    async def run_forever(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drive rounds until cancelled. Messages may be delivered as soon as it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._outcomes.start(nursery)
            self._attempts.start(nursery)
            self._lineage_watch.excuse(trio.current_time())
            nursery.start_soon(self._watch_stalls)
            nursery.start_soon(self._keep_time)
            task_status.started()
            await self._drive()

    # --- where we stand -------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The last resolved round, and what the next one is decided with."""
        return self.round_state.head

    @property
    def round_state(self) -> State:
        """The state of the round after the head."""
        return self._consensus.state

    @property
    def reach(self) -> int:
        """How many voters of our head we are linked with, ourselves included."""
        return self._liveness.reach(self.head)

    @property
    def busy(self) -> bool:
        """Whether the anchor is being replaced, so that it must not be read."""
        return self._outcomes.busy

    @property
    def state_lock(self) -> trio.Lock:
        """Held while the anchor is being replaced; hold it to copy a consistent one."""
        return self._outcomes.lock

    @property
    def resolving(self) -> bool:
        """Whether an outcome is being brought home, or the state replaced."""
        return self._outcomes.resolving

    @property
    def finished(self) -> bool:
        """Whether the run's last round is behind us: nothing is decided any more."""
        return 0 < self.context.run.total_steps <= self.head.run_step

    @property
    def status(self) -> str:
        """What this peer is doing now, for people."""
        if self.resolving and self.round_state.learner.record is not None:
            return f"round {self.round_state.round}: landing"
        stage = self._attempts.stage
        return f"round {self.round_state.round}: {stage}" if stage else "training"

    def may_stand_at(self, head: Head) -> bool:
        """Whether we have never stood at this place, and it is not behind us in our lineage.

        What we promised and accepted is forgotten with each head: at the same place we would vote a second time.
        """
        return self._places.may_stand_at(head)

    def set_head(self, head: Head) -> None:
        """Stand at this head, after founding, adopting or a committed round. Forgets votes and plans of before.

        Only where `may_stand_at` allows it.
        """
        assert self.may_stand_at(head), f"we stood at {head.lineage}/{head.round} before"
        self._places.note(head)
        self._give_up("we stand on another state now")
        same_lineage = head.lineage == self.head.lineage
        self._consensus.state = self._begin(head)
        self._caller.election.begin(head, same_lineage=same_lineage)
        self._lineage_watch.excuse(trio.current_time())
        self._forget_snapshot()
        self._outcomes.forget()
        self._wake()

    def found_lineage(self, head: Head) -> None:
        """Go on alone from this head under a new lineage, as its only voter; others adopt it."""
        own = self._liveness.own
        lineage = new_lineage(head.lineage, head.round, *own)
        logger.info("the voters of lineage %s are gone: beginning lineage %s", head.lineage, lineage)
        self.set_head(dataclasses.replace(head, lineage=lineage, voters=(own,)))
        self._exchange.epoch = Epoch(lineage, head.round)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold rounds off while the whole state is replaced; waits until an outcome under way has landed."""
        async with self._outcomes.held_off(lambda: self._give_up("its state is being replaced")):
            yield

    def leave(self) -> None:
        """Begin and follow no round any more; one that is being brought home is, while we are still there."""
        self._leaving = True
        if not self.resolving:
            self._give_up("it leaves")

    async def land(self, landing: Landing) -> None:
        """Hand a landing to the training thread and wait until it has taken effect; one at a time."""
        await self._outcomes.land(landing)

    async def adopt_record(self, sender: PeerId, record: Record) -> None:
        """Bring a round home that we missed, by the record that another peer gave us.

        Returns once it has landed, or when it cannot be shown that it was committed, or its parts are gone; at once if
        it is not the next.
        """
        head = self.head
        self.deliver(sender, Commit(record))
        while (
            self.head is head
            and (self.resolving or self.round_state.learner.heard)
            and self._outcomes.lacking != record
        ):
            await self._changed.wait()

    def _begin(self, head: Head) -> State:
        return begin(*self._liveness.own, head, self.context.timeouts.limits(0.0, 0.0))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _forget_snapshot(self) -> None:
        self._attempts_failed = 0
        self._taker.forget()

    # --- messages -------------------------------------------------------------------------------------------------

    def tell(self, peer_id: PeerId, message: Message) -> None:
        """Send a control message, also to ourselves; lost when the peer is not linked."""
        if peer_id == self.context.peer_id:
            self.deliver(peer_id, message)
        elif (link := self.context.links.get(peer_id)) is not None:
            link.send(message)

    def deliver(self, sender: PeerId, message: Message, payload: bytes = b"") -> None:
        """Take one round message. Raises WireError where it breaks the protocol; stale ones are ignored."""
        if isinstance(message, Join):
            policy.check_join(message)
        match message:
            case Inquire():
                self._consensus.receive(sender, message)
            case Call() | Commit() if self.resolving or self._is_one_ahead(message):
                # Of the round after the one whose outcome we are about to take: taken up once it has landed.
                if (sender, type(message)) in self._deferred or len(self._deferred) < MAX_DEFERRED:
                    self._deferred[sender, type(message)] = message
            case Due():
                if self._caller.election.note_due(sender, message, self.head):
                    self._wake()
            case _ if self.resolving or self.finished or self._leaving:
                pass
            case Call():
                self._on_call(sender, message)
            case Propose() | Ready() | Abort() | Accepted():
                self._consensus.receive(sender, message)
            case Commit(record=record):
                self._consensus.receive(sender, message)
                if self.round_state.learner.heard:
                    self._outcomes.prefetch(record, self.head.state_sha256)
            case Join():
                self._consensus.receive(sender, message)
                if (
                    message.attempt.leader == self.context.peer_id
                    and message.attempt.counter == self.round_state.highest
                ):
                    # Also one that comes after the window: the next window is longer.
                    self._caller.election.note_spread(trio.current_time() - self._called_s)
            case Withdraw() | Refuse() | Roster():
                self._consensus.receive(sender, message)
                self._attempts.deliver(sender, message, payload)
            case Reduce() | Arrived() | Reduced() | Contribution():
                self._attempts.deliver(sender, message, payload)
            case _:
                raise WireError(f"{type(message).__name__} is no round message")

    def _is_one_ahead(self, message: Call | Commit) -> bool:
        of = message if isinstance(message, Call) else message.record
        return (of.lineage, of.round) == (self.head.lineage, self.round_state.round + 1)

    def note_lost(self, peer_id: PeerId) -> None:
        """A link broke: whoever waits for that peer learns it now."""
        self._attempts.note_lost(peer_id)
        self._consensus.apply(Lost(peer_id))
        self._wake()

    def _on_call(self, sender: PeerId, call: Call) -> None:
        now, member = trio.current_time(), self.round_state.member
        if member is not None and member.attempt.leader == sender and member.attempt < call.attempt:
            # It called before, and has not ended that attempt: nobody else's is to wait for it.
            self._pass_over(sender)
            if sender != self.context.peer_id:
                self._consensus.apply(MemberFailed(member.attempt, "its leader called again before it had ended"))
        if sender in self._leaders.passed_over(now):
            return
        limits = self.context.timeouts.limits(self._caller.window_s(), self._liveness.round_trip_s())
        self._consensus.limit(limits)
        self._consensus.receive(sender, call)
        election = self._caller.election
        election.counter = max(election.counter, min(call.attempt.counter, self.round_state.highest))

    def _pass_over(self, leader: PeerId) -> None:
        """Follow this leader for a while no more: its attempts come to nothing."""
        if leader != self.context.peer_id:
            logger.info("%s called rounds that came to nothing", leader)
            self._leaders.note(leader, trio.current_time(), SILENT_LEADER_S)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        # One that was asked for before the head moved on belongs to no round any more.
        if snapshot.epoch != Epoch(self.head.lineage, self.head.round):
            return
        try:
            self._taker.arrive(snapshot)
        except Exception as error:
            # Our bug. We join without one.
            self.context.errors.note(f"the snapshot of round {self.round_state.round} is lost", error)

    # --- consensus ------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect, cause: Event) -> None:
        """Do one thing that the consensus wants. An error in it costs the attempt that it belongs to."""
        try:
            match effect:
                case Send(to, message):
                    self.tell(to, message)
                case Broadcast(message):
                    for peer_id in self._liveness.peers.trainers():
                        self.tell(peer_id, message)
                case Prepare():
                    if self._attempts_failed == 0:
                        self._taker.begin()
                    self._attempts.take_part(effect, self.head)
                case Fetch():
                    self._attempts.fetch(effect)
                case Average():
                    assert self.round_state.proposer is not None
                    rtt_s = self._liveness.round_trip_s()
                    self._attempts.lead(effect, self.head, self.round_state.proposer.attempt_s, rtt_s)
                case MemberEnded():
                    self._on_member_ended(effect, cause)
                case LeaderEnded():
                    self._on_leader_ended(effect)
                case Learned(record):
                    self._on_learned(record)
                case Unproven(record):
                    self._events.fall_behind(f"round {record.round}: no quorum says that it was committed")
        except Exception as error:
            self.context.errors.note(f"{type(effect).__name__} could not be done", error)
            match effect:
                case Prepare(attempt, _) | Fetch(attempt, _) | Send(_, Join(attempt=attempt)):
                    self._consensus.apply(MemberFailed(attempt, "unexpected error"))
                case Average(attempt, _):
                    self._consensus.apply(LeaderFailed(attempt, "unexpected error"))

    def _on_member_ended(self, effect: MemberEnded, cause: Event) -> None:
        if self._attempts.followed != effect.attempt:
            return
        self._attempts.end_member()
        self.parts.end_attempt()
        leader = effect.attempt.leader
        if self.round_state.member is None:
            self._in_vain[leader] += 1
        if isinstance(cause, Tick) or self._in_vain[leader] >= MAX_ATTEMPTS:
            self._pass_over(leader)
        if self.round_state.member is None:
            # Not superseded by another attempt.
            self._attempts_failed += 1
            if self._attempts_failed >= MAX_ATTEMPTS and self.round_state.acceptor.record is None:
                self._skip(effect.reason)
        self._wake()

    def _on_leader_ended(self, effect: LeaderEnded) -> None:
        logger.info("round %d, attempt %d: %s", self.round_state.round, effect.attempt.counter, effect.reason)
        if effect.timed_out:
            # The next one gets several times as long, up to the user's bound.
            self.context.timeouts.note_round(trio.current_time() - self._called_s)
        self._attempts.end_leader()
        self._rest_until_s = trio.current_time() + self._rng.uniform(*REST_S)
        self._wake()

    def _on_learned(self, record: Record) -> None:
        if self._attempts.followed is not None:
            # Only who brought a round to its end gets another chance, not who kept others from it meanwhile.
            leader = self._attempts.followed.leader
            self._leaders.forget(leader)
            self._in_vain.pop(leader, None)
        self._attempts.end_member()
        self._attempts.end_leader()
        self._outcomes.resolve(record, self.head.state_sha256)

    def _give_up(self, reason: str) -> None:
        """Take part in no attempt any more, and lead none; who takes part with us is told."""
        self._attempts.end_member()
        self._attempts.end_leader()
        if self.round_state.proposer is not None:
            self._consensus.apply(LeaderFailed(self.round_state.proposer.attempt, reason))
        if self.round_state.member is not None:
            self._consensus.apply(MemberFailed(self.round_state.member.attempt, reason))

    def _skip(self, reason: str) -> None:
        """Nothing changes but the time of the next round; what was learnt stays in the weights."""
        self._forget_snapshot()
        self._exchange.postpone()
        self._caller.election.skip(self.round_state.round)
        head = self.head
        self._events.round_ended(
            RoundReport(head.round + 1, "skipped", head.lineage, parent_sha256=head.state_sha256, reason=reason)
        )

    # --- time -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Say when we are due, lead when it is our turn, and see whether the voters are still there."""
        while True:
            changed, wake_s = self._changed, LOOK_S
            if self.head.lineage and not self.resolving and not self.finished and not self._leaving:
                try:
                    wake_s = self._look(trio.current_time())
                except Exception as error:
                    # Our bug. What is to be done is looked at again, a little later.
                    self.context.errors.note("the next round could not be seen to", error)
                    changed = trio.Event()
            with trio.move_on_after(wake_s):
                await changed.wait()

    def _look(self, now: float) -> float:
        """Do what it is time for; returns how soon to look again."""
        wake_s = LOOK_S
        if self.round_state.learner.record is not None:
            self._outcomes.retry(self.round_state.learner.record, self.head.state_sha256, now)
        elif self.round_state.member is None and self.round_state.proposer is None and not self._caller.waits(now):
            wake_s = self._call(now)
        three_intervals_s = 3 * self.context.run.sync_every * self._exchange.step_s
        if not self._outcomes.interrupted and self._lineage_watch.has_ended(self.head, three_intervals_s, now):
            self.found_lineage(self.head)
        return wake_s

    def _call(self, now: float) -> float:
        """Say that we are due, and lead, where it is time for that; returns how soon to look again."""
        due = self._caller.due(self.head, self._attempts_failed, now)
        if due is not None:
            for peer_id in (self.context.peer_id, *self._liveness.peers.trainers()):
                self.tell(peer_id, due)
        if not self._caller.is_ours_to_lead(self.head, now):
            return LOOK_S
        if now < self._rest_until_s:
            return self._rest_until_s - now
        self._called_s = now
        self._consensus.apply(self._caller.lead())
        return LOOK_S

    async def _keep_time(self) -> None:
        """Tell the consensus when one of its deadlines has passed."""
        while True:
            changed = self._changed
            with trio.move_on_at(deadline_s(self.round_state)):
                await changed.wait()
            if trio.current_time() >= deadline_s(self.round_state):
                self._consensus.apply(Tick())
                if trio.current_time() >= deadline_s(self.round_state):
                    await trio.sleep(STALL_POLL_S)  # it failed

    async def _watch_stalls(self) -> None:
        excused = False
        while True:
            slept_from_s = trio.current_time()
            await trio.sleep(STALL_POLL_S)
            # When we were held up ourselves, what others sent meanwhile waits to be read.
            slept_s = trio.current_time() - slept_from_s
            excused = slept_s > HELD_UP_S and not excused
            if slept_s > PAUSED_S:
                self._lineage_watch.excuse(trio.current_time())
            followed = self._attempts.followed
            if followed is not None and not excused:
                if not self._liveness.is_linked(followed.leader):
                    self.note_lost(followed.leader)
                self._attempts.give_up_stalled()

    # --- the outcome ----------------------------------------------------------------------------------------------

    async def _fetch(self, record: Record) -> None:
        await self._outcomes.fetch(record, self.head.state_sha256)

    def _on_outcome_ended(self) -> None:
        """An outcome has landed or failed, or the state was replaced: what came meanwhile is taken up."""
        self._wake()
        deferred, self._deferred = self._deferred, {}
        for (sender, _), message in deferred.items():
            # A leader that was lost meanwhile calls nobody any more.
            if not self._liveness.is_linked(sender):
                continue
            try:
                self.deliver(sender, message)
            except Exception as error:
                logger.warning("%s of %s came to nothing: %r", type(message).__name__, sender, error)
