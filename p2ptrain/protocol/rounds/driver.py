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
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.exchange_types import Epoch, Landing, RoundReport, Snapshot
from p2ptrain.protocol.faults import Faults
from p2ptrain.protocol.parts import KEEP_ALL_S
from p2ptrain.protocol.rounds import consensus, policy
from p2ptrain.protocol.rounds.commit import Committer, check_record
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.events import (
    Average,
    Averaged,
    Broadcast,
    Effect,
    Event,
    Fetch,
    Lead,
    LeaderEnded,
    LeaderFailed,
    Learned,
    Lost,
    MemberEnded,
    MemberFailed,
    Prepare,
    Received,
    Send,
    Tick,
    Unproven,
)
from p2ptrain.protocol.rounds.fetching import RecordFetcher
from p2ptrain.protocol.rounds.leader import AveragingLeader
from p2ptrain.protocol.rounds.leader_election import LeaderElection
from p2ptrain.protocol.rounds.lineage import LineageWatch, new_lineage
from p2ptrain.protocol.rounds.liveness import Liveness, Peers
from p2ptrain.protocol.rounds.member import Participation, innermost
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
# How often we look who has stalled; when that is late by more, it was us, and by much more, we were paused.
STALL_POLL_S, HELD_UP_S, PAUSED_S = 0.25, 1.0, 10.0
# Due, and nobody calls: say it again, to the next leader in line.
DUE_AGAIN_S = 3.0
# One who is alone lets a round wait this long for joiners that make progress. 124M parameters and a moment come in 90 s
# at 100 Mbit/s, in a quarter of an hour at 10 Mbit/s.
JOINERS_PATIENCE_S = 1000.0
# A JOIN is sent at the end of the window at the latest; on a busy machine it is under way this long (guess).
JOIN_GRACE_S = 0.5
# Two leaders that got into each other's way must not meet again.
REST_S = (0.05, 0.3)
# An outcome that could not be brought home is tried again after this, so many times (guess).
RETRY_S, MAX_RETRIES = 5.0, 5


class RoundEvents(Protocol):
    """What the node is told."""

    def round_ended(self, report: RoundReport) -> None: ...

    def fall_behind(self, reason: str) -> None:
        """This peer cannot follow by records any more: replace the whole state."""
        ...


class RoundDriver:
    """Owns the head and the state of the consensus. See the package docstring for who does what."""

    def __init__(
        self, context: RoundContext, peers: Peers, events: RoundEvents, faults: Faults, rng: random.Random
    ) -> None:
        self.context = context
        self.parts = context.parts
        self._events_out = events
        self._rng = rng
        self._exchange = context.exchange
        self._liveness = Liveness((context.peer_id, context.incarnation), context.links, peers)
        self._election = LeaderElection()
        self._silences = Silences()
        self._lineage_watch = LineageWatch(self._liveness)
        self._taker = SnapshotTaker(
            context.run, context.exchange, context.state, context.links.counters, context.compute, faults
        )
        self._committer = Committer(context)
        self._fetcher = RecordFetcher(context.parts, context.averaging, context.compute)
        self._state = self._begin(Head("", "", -1, "", "", (), 0, 0, None))
        self._queue: deque[Event] = deque()
        self._pumping = False
        self._participation: Participation | None = None
        self._leader: AveragingLeader | None = None
        self._called_s = 0.0
        self._attempts_failed = 0
        self._resolving = self._leaving = False
        self._retries = 0
        self._retry_s = self._rest_until_s = self._due_from_s = 0.0
        self._deferred: dict[type[Message], tuple[PeerId, Message]] = {}
        self._changed = trio.Event()
        self._stepped = trio.Event()
        self._nursery: trio.Nursery | None = None
        context.exchange.on_due = self._wake
        context.exchange.on_snapshot = self._on_snapshot

    async def run_forever(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drive rounds until cancelled. Messages may be delivered as soon as it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._lineage_watch.excuse()
            nursery.start_soon(self._watch_stalls)
            nursery.start_soon(self._keep_time)
            task_status.started()
            await self._drive()

    # --- where we stand -------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The last resolved round, and what the next one is decided with."""
        return self._state.head

    @property
    def round_state(self) -> consensus.State:
        """The state of the round after the head."""
        return self._state

    @property
    def reach(self) -> int:
        """How many voters of our head we are linked with, ourselves included."""
        return self._liveness.reach(self.head)

    @property
    def busy(self) -> bool:
        """Whether the anchor is being replaced, so that it must not be read."""
        return self._committer.stepping

    @property
    def state_lock(self) -> trio.Lock:
        """Held while the anchor is being replaced; hold it to copy a consistent one."""
        return self._committer.lock

    @property
    def resolving(self) -> bool:
        """Whether an outcome is being brought home, or the state replaced."""
        return self._resolving

    @property
    def finished(self) -> bool:
        """Whether the run's last round is behind us: nothing is decided any more."""
        return 0 < self.context.run.total_steps <= self.head.run_step

    @property
    def status(self) -> str:
        """What this peer is doing now, for people."""
        if self._resolving and self._state.learner.record is not None:
            return f"round {self._state.round}: landing"
        if self._participation is not None:
            return f"round {self._state.round}: {self._participation.stage}"
        return "training"

    def set_head(self, head: Head) -> None:
        """Stand at this head, after founding, adopting or a committed round. Forgets votes and plans of before."""
        self._give_up("we stand on another state now")
        same_lineage = head.lineage == self.head.lineage
        self._state = self._begin(head)
        self._election.begin(head, same_lineage=same_lineage)
        self._lineage_watch.excuse()
        self._forget_snapshot()
        self._committer.forget()
        self._fetcher.cancel()
        self._retries = 0
        self._wake()

    def found_lineage(self) -> None:
        """Go on alone from our head under a new lineage, as its only voter; others adopt it."""
        head, own = self.head, self._liveness.own
        lineage = new_lineage(head.lineage, head.round, *own)
        logger.info("the voters of lineage %s are gone: beginning lineage %s", head.lineage, lineage)
        self.set_head(dataclasses.replace(head, lineage=lineage, voters=(own,)))
        self._exchange.epoch = Epoch(lineage, head.round)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold rounds off while the whole state is replaced; waits until an outcome under way has landed."""
        while self._resolving:
            await self._changed.wait()
        self._resolving = self._committer.stepping = True
        self._give_up("its state is being replaced")
        try:
            async with self.state_lock:
                yield
        finally:
            self._resolving = self._committer.stepping = False
            self._wake()

    def leave(self) -> None:
        """Begin and follow no round any more; one that is being brought home is, while we are still there."""
        self._leaving = True
        if not self._resolving:
            self._give_up("it leaves")

    async def land(self, landing: Landing) -> None:
        """Hand a landing to the training thread and wait until it has taken effect; one at a time."""
        await self._committer.land(landing)

    async def adopt_record(self, sender: PeerId, record: Record) -> None:
        """Bring a round home that we missed, by the record that another peer gave us.

        Returns once it has landed, or when it cannot be shown that it was committed; at once if it is not the next.
        """
        head = self.head
        self.deliver(sender, Commit(record))
        while self.head is head and (self._resolving or self._state.learner.heard):
            changed, stepped = self._changed, self._stepped
            async with trio.open_nursery() as nursery:
                for event in (changed, stepped):
                    nursery.start_soon(_wait_then_cancel, event, nursery.cancel_scope)

    def _begin(self, head: Head) -> consensus.State:
        return consensus.begin(*self._liveness.own, head, self.context.timeouts.limits(0.0, 0.0))

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
                self._receive(sender, message)
            case Call() | Commit() if self._resolving:
                # Of the round after the one that is landing here: taken up once it has landed.
                self._deferred[type(message)] = (sender, message)
            case Due():
                if self._election.note_due(sender, message, self.head):
                    self._wake()
            case _ if self._resolving or self.finished or self._leaving:
                pass
            case Call(attempt=attempt):
                self._on_call(sender, message)
            case Propose() | Ready() | Commit() | Abort() | Accepted():
                self._receive(sender, message)
            case Join():
                self._receive(sender, message)
                if message.attempt.leader == self.context.peer_id and message.attempt.counter == self._state.highest:
                    # Also one that comes after the window: the next window is longer.
                    self._election.note_spread(trio.current_time() - self._called_s)
            case Withdraw(attempt=attempt) | Refuse(attempt=attempt):
                self._receive(sender, message)
                if self._leader is not None and attempt == self._leader.attempt:
                    self._leader.note_gone(sender)
            case Roster(attempt=attempt):
                self._receive(sender, message)
                self._to_participation(sender, message)
            case Reduce():
                self._to_participation(sender, message)
            case Arrived(attempt=attempt) | Reduced(attempt=attempt):
                if self._leader is not None and attempt == self._leader.attempt:
                    self._leader.deliver(sender, message)
            case Contribution(attempt=attempt):
                if self._participation is not None and attempt == self._participation.attempt:
                    self._participation.contribute(sender, message, payload)
            case _:
                raise WireError(f"{type(message).__name__} is no round message")

    def note_lost(self, peer_id: PeerId) -> None:
        """A link broke: whoever waits for that peer learns it now."""
        if self._participation is not None:
            self._participation.note_lost(peer_id)
        if self._leader is not None:
            self._leader.note_gone(peer_id)
        self._apply(Lost(peer_id))
        self._wake()

    def _to_participation(self, sender: PeerId, message: Roster | Reduce) -> None:
        participation = self._participation
        if participation is not None and message.attempt == participation.attempt and sender == message.attempt.leader:
            participation.deliver(message)

    def _on_call(self, sender: PeerId, call: Call) -> None:
        now, member = trio.current_time(), self._state.member
        own = member is not None and member.attempt.leader == sender and member.attempt < call.attempt
        if own and member is not None and not member.planned:
            # It called before, and has neither gone on with that attempt nor ended it.
            self._silences.note(sender, now, SILENT_LEADER_S)
        if sender in self._silences.passed_over(now):
            return
        limits = self.context.timeouts.limits(self._window_s(), self._liveness.round_trip_s())
        self._state = dataclasses.replace(self._state, limits=limits)
        self._receive(sender, call)
        self._election.counter = max(self._election.counter, min(call.attempt.counter, self._state.highest))

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        # One that was asked for before the head moved on belongs to no round any more.
        if snapshot.epoch == Epoch(self.head.lineage, self.head.round):
            self._taker.arrive(snapshot)

    # --- consensus ------------------------------------------------------------------------------------------------

    def _receive(self, sender: PeerId, message: Message) -> None:
        """Take a message to the consensus. Raises WireError where it breaks a rule."""
        self._queue.append(Received(sender, message))
        self._pump()

    def _apply(self, event: Event) -> None:
        """Take an event of our own to the consensus; nothing is raised."""
        self._queue.append(event)
        try:
            self._pump()
        except Exception:
            logger.exception("%s could not be taken in", type(event).__name__)

    def _pump(self) -> None:
        """Take in what is queued, and do what the consensus says. What that causes is queued behind it."""
        if self._pumping:
            return
        self._pumping = True
        before = self._state
        try:
            while self._queue:
                event = self._queue.popleft()
                self._state, effects = consensus.step(self._state, event, trio.current_time())
                for effect in effects:
                    self._carry_out(effect, event)
        finally:
            self._pumping = False
            if (before.member, before.proposer, before.learner) != (
                self._state.member, self._state.proposer, self._state.learner
            ):  # fmt: skip
                self._stepped.set()
                self._stepped = trio.Event()

    def _carry_out(self, effect: Effect, cause: Event) -> None:
        """Do one thing that the consensus wants. An error in it costs the attempt that it belongs to."""
        try:
            match effect:
                case Send(to, message):
                    self.tell(to, message)
                case Broadcast(message):
                    for peer_id in self._liveness.trainers():
                        self.tell(peer_id, message)
                case Prepare():
                    self._begin_attempt(effect)
                case Fetch():
                    if self._participation is not None and self._participation.attempt == effect.attempt:
                        self._participation.deliver(effect)
                case Average():
                    self._begin_averaging(effect)
                case MemberEnded():
                    self._on_member_ended(effect, cause)
                case LeaderEnded():
                    self._on_leader_ended(effect)
                case Learned(record):
                    self._on_learned(record)
                case Unproven(record):
                    self._events_out.fall_behind(f"round {record.round}: no quorum says that it was committed")
        except Exception:
            logger.exception("%s could not be done", type(effect).__name__)
            match effect:
                case Prepare(attempt, _) | Fetch(attempt, _):
                    self._queue.append(MemberFailed(attempt, "unexpected error"))
                case Average(attempt, _):
                    self._queue.append(LeaderFailed(attempt, "unexpected error"))

    def _begin_attempt(self, effect: Prepare) -> None:
        assert self._nursery is not None
        self._end_participation()
        if self._attempts_failed == 0:
            self._taker.begin()
        self._participation = Participation(
            self.context, effect.attempt, self.head, self._taker, fetch=self._fetch, tell=self.tell, apply=self._apply
        )
        self._nursery.start_soon(self._participation.run, effect.window_s)

    def _begin_averaging(self, effect: Average) -> None:
        proposer = self._state.proposer
        if proposer is None or self._nursery is None:
            return
        self._leader = AveragingLeader(
            self.context, self._silences, effect.attempt, self.head, attempt_s=proposer.attempt_s,
            rtt_s=self._liveness.round_trip_s(), tell=self.tell,
        )  # fmt: skip
        self._nursery.start_soon(self._average, self._leader, dict(effect.joins))

    async def _average(self, leader: AveragingLeader, joins: dict[PeerId, Join]) -> None:
        with leader.scope:
            try:
                self._apply(Averaged(leader.attempt, await leader.run(joins)))
            except RoundFailedError as error:
                self._apply(LeaderFailed(leader.attempt, str(error)))
            except Exception as error:
                logger.exception("attempt %d ended by an unexpected error", leader.attempt.counter)
                self._apply(LeaderFailed(leader.attempt, f"unexpected error: {error!r}"))

    def _on_member_ended(self, effect: MemberEnded, cause: Event) -> None:
        participation = self._participation
        if participation is None or participation.attempt != effect.attempt:
            return
        self._end_participation()
        if isinstance(cause, Tick):
            self._silences.note(effect.attempt.leader, trio.current_time(), SILENT_LEADER_S)
        if self._state.member is None:
            # Not superseded by another attempt.
            self._attempts_failed += 1
            if self._attempts_failed >= MAX_ATTEMPTS and self._state.acceptor.record is None:
                self._skip(effect.reason)
        self._wake()

    def _on_leader_ended(self, effect: LeaderEnded) -> None:
        logger.info("round %d, attempt %d: %s", self._state.round, effect.attempt.counter, effect.reason)
        if effect.timed_out and self._leader is not None:
            # The next one gets several times as long, up to the user's bound.
            self.context.timeouts.note_round(trio.current_time() - self._called_s)
        self._end_leader()
        self._rest_until_s = trio.current_time() + self._rng.uniform(*REST_S)
        self._wake()

    def _on_learned(self, record: Record) -> None:
        attempt = self._state.acceptor.attempt
        if attempt is not None:
            self._silences.excuse(attempt.leader)
        self._end_participation()
        self._end_leader()
        self._resolve_soon(record)

    def _end_participation(self) -> None:
        if self._participation is not None:
            self._participation.scope.cancel()
            self._participation = None

    def _end_leader(self) -> None:
        if self._leader is not None:
            self._leader.scope.cancel()
            self._leader = None

    def _give_up(self, reason: str) -> None:
        """Take part in no attempt any more, and lead none; who takes part with us is told."""
        self._end_participation()
        self._end_leader()
        if self._state.proposer is not None:
            self._apply(LeaderFailed(self._state.proposer.attempt, reason))
        if self._state.member is not None:
            self._apply(MemberFailed(self._state.member.attempt, reason))

    def _skip(self, reason: str) -> None:
        """Nothing changes but the time of the next round; what was learnt stays in the weights."""
        self._forget_snapshot()
        self._exchange.postpone()
        self._election.skip(self._state.round)
        head = self.head
        self._events_out.round_ended(
            RoundReport(head.round + 1, "skipped", head.lineage, parent_sha256=head.state_sha256, reason=reason)
        )

    # --- time -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Say when we are due, lead when it is our turn, and see whether the voters are still there."""
        said_s, said_for = 0.0, ("", -2, 0)
        while True:
            changed, wake_s = self._changed, 1.0
            if self.head.lineage and not self._resolving and not self.finished and not self._leaving:
                now = trio.current_time()
                waits = self._awaits_joiners(now)
                idle = self._state.member is None and self._state.proposer is None
                if self._state.learner.record is not None:
                    self._retry(now)
                elif idle and self._exchange.due and not waits:
                    this = (self.head.lineage, self.head.round, self._attempts_failed)
                    if this != said_for or now - said_s > DUE_AGAIN_S:
                        self._election.counter += this == said_for
                        said_s, said_for = now, this
                        self._say_due()
                        changed = self._changed
                if idle and not waits and self._is_ours_to_lead():
                    if now >= self._rest_until_s:
                        self._lead()
                    else:
                        wake_s = self._rest_until_s - now
                three_intervals_s = 3 * self.context.run.sync_every * self._exchange.step_s
                if not self._committer.interrupted and self._lineage_watch.has_ended(self.head, three_intervals_s):
                    self.found_lineage()
            with trio.move_on_after(wake_s):
                await changed.wait()

    def _awaits_joiners(self, now: float) -> bool:
        """Alone, a round had better wait for peers that are taking over the state, as it would change under them.

        Only alone: where there are others to agree with, a slow joiner holds nobody up.
        """
        if not self._exchange.due:
            self._due_from_s = now
        if self._exchange.at_length or not self._liveness.alone() or not self._liveness.joiners():
            return False
        return now - self._due_from_s < JOINERS_PATIENCE_S

    def _is_ours_to_lead(self) -> bool:
        head, passed_over = self.head, self._silences.passed_over(trio.current_time())
        if self._state.learner.record is not None:
            return False
        present = {voter for voter in self._liveness.present() if voter[0] not in passed_over}
        return self._election.is_ours(self.context.peer_id, head, present, self._liveness.reaches(head))

    def _say_due(self) -> None:
        due = Due(self.head.lineage, self.head.round + 1, self._election.counter)
        for peer_id in (self.context.peer_id, *self._liveness.trainers()):
            self.tell(peer_id, due)

    def _lead(self) -> None:
        called = (*self._liveness.trainers(), self.context.peer_id)
        grace_s = max(JOIN_GRACE_S, 2 * self._liveness.round_trip_s())
        self._called_s = trio.current_time()
        self._apply(
            Lead(called, self._window_s(), grace_s, self.context.timeouts.attempt_s(), self._election.counter)
        )  # fmt: skip

    def _window_s(self) -> float:
        speeds = [beat.speed for beat in self._liveness.beats().values()]
        return self._election.window_s(self.context.run.sync_every, self._exchange.step_s, speeds)

    async def _keep_time(self) -> None:
        """Tell the consensus when one of its deadlines has passed."""
        while True:
            stepped = self._stepped
            with trio.move_on_at(consensus.deadline_s(self._state)):
                await stepped.wait()
            if trio.current_time() >= consensus.deadline_s(self._state):
                self._apply(Tick())

    async def _watch_stalls(self) -> None:
        excused = False
        while True:
            slept_from_s = trio.current_time()
            await trio.sleep(STALL_POLL_S)
            # When we were held up ourselves, what others sent meanwhile waits to be read.
            slept_s = trio.current_time() - slept_from_s
            excused = slept_s > HELD_UP_S and not excused
            if slept_s > PAUSED_S:
                self._lineage_watch.excuse()
            participation = self._participation
            if participation is not None and not excused:
                if not self._liveness.is_linked(participation.attempt.leader):
                    self.note_lost(participation.attempt.leader)
                participation.give_up_stalled()

    # --- the outcome ----------------------------------------------------------------------------------------------

    async def _fetch(self, record: Record) -> None:
        """Hold all parts of a record, verified by hash and decodable.

        Raises RoundFailedError, PeerLostError or WireError.
        """
        check_record(record, self.context.state, self.context.averaging)
        if record.parent_sha256 != self.head.state_sha256:
            raise RoundFailedError("the record starts from another state than ours")
        assert self._nursery is not None
        await self._fetcher.fetch(record, self._liveness.trainers(), self._nursery)

    def _resolve_soon(self, record: Record) -> None:
        assert self._nursery is not None
        self._resolving = True
        self._nursery.start_soon(self._resolve, record)

    def _retry(self, now: float) -> None:
        """The outcome is known, and could not be brought home: try again, unless the state is replaced before."""
        record = self._state.learner.record
        if record is not None and self._retries <= MAX_RETRIES and now >= self._retry_s:
            self._resolve_soon(record)

    async def _resolve(self, record: Record) -> None:
        """Fetch what is missing, step the anchor, land; what cannot be had any more ends in `fall_behind`."""
        try:
            await self._fetch(record)
            await self._commit(record)
        except (RoundFailedError, PeerLostError, WireError) as error:
            self._cannot_adopt(record, str(error))
        except Exception as error:
            # Our bug. The outcome is decided and stays so: it is tried again, and the whole state replaced if need be.
            logger.exception("round %d could not be brought home", record.round)
            self._cannot_adopt(record, f"unexpected error: {innermost(error)!r}")
        finally:
            self._resolving = False
            self._wake()
        deferred, self._deferred = self._deferred, {}
        for sender, message in deferred.values():
            # A leader that was lost meanwhile calls nobody any more.
            if self._liveness.is_linked(sender):
                self._deliver_late(sender, message)

    def _deliver_late(self, sender: PeerId, message: Message) -> None:
        try:
            self.deliver(sender, message)
        except Exception as error:
            logger.warning("%s of %s came to nothing: %r", type(message).__name__, sender, error)

    def _cannot_adopt(self, record: Record, reason: str) -> None:
        if self._state.learner.record is None:
            return  # the step is taken; only what came after it failed
        self._retries += 1
        self._retry_s = trio.current_time() + RETRY_S
        self._events_out.fall_behind(f"round {record.round} cannot be adopted: {reason}")

    async def _commit(self, record: Record) -> None:
        """Take the outer step, land it, and say so."""
        contributors = ((c.peer_id, c.incarnation) for c in record.contributors)
        included = self._taker.own is not None and self._liveness.own in contributors

        def stand_at(head: Head) -> None:
            if self._taker.own is not None:
                self.context.timeouts.note_round(self._taker.spent().wall_s)
            self.set_head(head)

        report = await self._committer.commit(record, self._taker, included=included, stand_at=stand_at)
        assert self._nursery is not None
        self._nursery.start_soon(self._trim_later, record)
        self._events_out.round_ended(report)

    async def _trim_later(self, record: Record) -> None:
        await trio.sleep(KEEP_ALL_S)
        # Not while an attempt is under way or undecided, whose parts are in the same store.
        undecided = self._participation or self._state.acceptor.record or self._fetcher.needed
        if not undecided and not self._resolving:
            self.parts.trim(record, self.context.peer_id)


async def _wait_then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
