"""The consensus of the round after the head, and the tasks of its attempts.

Events go to `consensus.step` one at a time. Its effects become messages, and tasks: at most one attempt that we take
part in, and one that we lead. An error in a task or an effect is reported to the consensus, and costs that attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Iterator

import trio

from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.exchange.types import Epoch, RoundReport, Snapshot
from p2ptrain.protocol.rounds.context import RoundContext, RoundEvents
from p2ptrain.protocol.rounds.deciding import consensus
from p2ptrain.protocol.rounds.deciding import events as ev
from p2ptrain.protocol.rounds.deciding.events import State
from p2ptrain.protocol.rounds.deciding.record import check_roster, check_size, joins_rounds
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S
from p2ptrain.protocol.rounds.landing.commit import Committer
from p2ptrain.protocol.rounds.moving.leader import AveragingLeader
from p2ptrain.protocol.rounds.moving.member import Participation
from p2ptrain.protocol.rounds.moving.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.rotation import LeaderRotation
from p2ptrain.protocol.rounds.schedule import Schedule
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# After so many failed attempts a round is skipped (guess).
MAX_ATTEMPTS = 3


class Attempts:
    """Gives events to the consensus of one round at a time, and runs the tasks that its effects ask for.

    Args:
        events: takes messages to ourselves, and learns when there may be something new to do or to wait for.

    Attributes:
        state: of the consensus.
        failed: attempts at this round that ended for us without an outcome.
    """

    def __init__(
        self,
        context: RoundContext,
        head: m.Head,
        taker: SnapshotTaker,
        schedule: Schedule,
        rotation: LeaderRotation,
        committer: Committer,
        events: RoundEvents,
    ) -> None:
        self.failed = 0
        self._context = context
        self._taker = taker
        self._schedule = schedule
        self._rotation = rotation
        self._committer = committer
        self._events = events
        self._failed_of: Counter[PeerId] = Counter()
        self._refused_from_s: dict[str, float] = {}  # by record
        self._member: Participation | None = None
        self._leader: AveragingLeader | None = None
        self._queue: deque[ev.Event] = deque()
        self._running = False
        self.state = self._first_state(head)

    def _first_state(self, head: m.Head) -> State:
        return State(*self._context.liveness.own, head, self._context.timeouts.limits(0.0, 0.0))

    def begin(self, head: m.Head) -> None:
        """Begin the round after a new head. Forgets what was promised and accepted."""
        self.give_up("its state has changed")
        self.state = self._first_state(head)
        self._context.parts.accepted = None
        self.failed = 0
        self._refused_from_s = {}
        self._taker.forget()

    @property
    def stage(self) -> str:
        """The stage of the attempt that we take part in, as text; empty if there is none."""
        return self._member.stage if self._member is not None else ""

    def give_up(self, reason: str) -> None:
        """Leave our attempts; the other peers in them are told."""
        self._end_member()
        self._end_leader()
        self._context.pushed.await_none()
        if self.state.proposer is not None:
            self.apply(ev.LeaderFailed(self.state.proposer.attempt, reason))
        if self.state.member is not None:
            self.apply(ev.MemberFailed(self.state.member.attempt, reason))

    def _end_member(self) -> None:
        if self._member is not None:
            self._member.scope.cancel()
            self._member = None

    def _end_leader(self) -> None:
        if self._leader is not None:
            self._leader.scope.cancel()
            self._leader = None

    # Events of the consensus.

    def apply(self, event: ev.Event) -> None:
        """Pass an event of our own to the consensus; nothing is raised."""
        self._queue.append(event)
        if not self._running:
            self._running = True
            self._run_queue(self.state)

    def _receive(self, sender: PeerId, message: m.Message) -> None:
        """Pass a message to the consensus. Raises WireError if it breaks a rule; the state is unchanged then."""
        event = ev.Received(sender, message)
        if self._running:
            self._queue.append(event)
            return
        self._running, before = True, self.state
        try:
            self._step(event)
        finally:
            self._run_queue(before)

    def _run_queue(self, before: State) -> None:
        while self._queue:
            event = self._queue.popleft()
            try:
                self._step(event)
            except Exception as error:
                # Our bug, or a message of our own that breaks a rule. It costs the attempt that it belongs to.
                self._context.errors.note(f"{type(event).__name__} could not be applied", error)
                match event:
                    case ev.Prepared(attempt, _) | ev.Held(attempt, _):
                        self._queue.append(ev.MemberFailed(attempt, "unexpected error"))
                    case ev.Averaged(attempt, _):
                        self._queue.append(ev.LeaderFailed(attempt, "unexpected error"))
        self._running = False
        now = self.state
        if (before.member, before.proposer, before.learned) != (now.member, now.proposer, now.learned):
            self._events.changed()

    def _step(self, event: ev.Event) -> None:
        # What an effect causes at once, such as a message to ourselves, is queued until all effects are done.
        self.state, effects = consensus.step(self.state, event, trio.current_time())
        accepted = self.state.acceptor.proposal
        self._context.parts.accepted = accepted.record if accepted is not None else None
        for effect in effects:
            try:
                self._carry_out(effect, event)
            except Exception as error:
                self._context.errors.note(f"{type(effect).__name__} could not be carried out", error)
                match effect:
                    case ev.Prepare(attempt, _) | ev.Fetch(attempt, _) | ev.Send(_, m.Join(attempt=attempt)):
                        self.apply(ev.MemberFailed(attempt, "unexpected error"))
                    case ev.Average(attempt, _):
                        self.apply(ev.LeaderFailed(attempt, "unexpected error"))

    # Effects of the consensus.

    def _carry_out(self, effect: ev.Effect, cause: ev.Event) -> None:
        match effect:
            case ev.Send(to, m.Ready() as ready):
                self.tell(to, self._context.prover.signed_ready(ready))
            case ev.Send(to, message):
                self.tell(to, message)
            case ev.Broadcast(message):
                for peer_id in self._context.host.lineage_peers():
                    self.tell(peer_id, message)
            case ev.Prepare(attempt, window_s):
                self._take_part(attempt, window_s)
            case ev.Fetch(attempt):
                if self._member is not None and self._member.attempt == attempt:
                    self._member.deliver(effect)
            case ev.Average(attempt, joins):
                self._lead(attempt, dict(joins))
            case ev.MemberEnded():
                self._on_member_ended(effect, timed_out=isinstance(cause, ev.Tick))
            case ev.LeaderEnded():
                logger.info("round %d, attempt %d: %s", self.state.round, effect.attempt.counter, effect.reason)
                self._schedule.note_led(trio.current_time(), timed_out=effect.timed_out)
                if self._leader is not None and effect.timed_out:
                    self._leader.note_timed_out()
                self._end_leader()
                self._events.changed()
            case ev.Learned(commit):
                if self._member is not None:
                    self._taker.sent = self._member.attempt == commit.attempt and self._member.has_sent
                # Only the leader of the attempt that was decided gets another chance.
                self._rotation.forgive(commit.attempt.leader)
                self._failed_of.pop(commit.attempt.leader, None)
                self._end_member()
                self._end_leader()
                self._committer.apply(commit)

    def tell(self, peer_id: PeerId, message: m.Message) -> None:
        """Send a control message, also to ourselves; dropped if the peer is not linked."""
        if peer_id == self._context.peer_id:
            self._events.deliver(peer_id, message)
        elif (link := self._context.links.get(peer_id)) is not None:
            link.send(message)

    def refused_for_s(self, sha256: str) -> float:
        """For how long this record of the present round has been refused here; from now on, if it was not before."""
        now = trio.current_time()
        if len(self._refused_from_s) < ev.MAX_UNHELD:
            self._refused_from_s.setdefault(sha256, now)
        return now - self._refused_from_s.get(sha256, now)

    def _take_part(self, attempt: m.Attempt, window_s: float) -> None:
        self._taker.begin_attempt()
        self._end_member()
        fetcher = self._committer.fetcher
        self._member = Participation(self._context, attempt, self.state.head, self._taker, fetcher, self)
        self._context.start_soon(self._member.run, window_s)

    def _lead(self, attempt: m.Attempt, joins: dict[PeerId, m.Join]) -> None:
        assert self.state.proposer is not None
        self._end_leader()
        attempt_s = self.state.proposer.attempt_s
        self._leader = AveragingLeader(self._context, attempt, self.state.head, attempt_s, self)
        self._context.start_soon(self._average, self._leader, joins)

    async def _average(self, leader: AveragingLeader, joins: dict[PeerId, m.Join]) -> None:
        with leader.scope:
            try:
                self.apply(ev.Averaged(leader.attempt, await leader.run(joins)))
            except RoundFailedError as error:
                self.apply(ev.LeaderFailed(leader.attempt, str(error)))
            except Exception as error:
                self._context.errors.note(f"attempt {leader.attempt.counter} of ours ended", error)
                self.apply(ev.LeaderFailed(leader.attempt, f"unexpected error: {error!r}"))

    def _on_member_ended(self, effect: ev.MemberEnded, *, timed_out: bool) -> None:
        """Count the failed attempt, ignore its leader if that fails again and again, and skip the round after three."""
        if self._member is None or self._member.attempt != effect.attempt:
            return
        leader, superseded = effect.attempt.leader, self.state.member is not None
        self._context.timeouts.note_unsent(self._member.unsent_s)
        self._end_member()
        self._context.parts.end_attempt()
        self._rotation.note_ended(leader, self.state.head, trio.current_time())
        if not superseded:
            self.failed += 1
            self._failed_of[leader] += 1
        if timed_out or self._failed_of[leader] >= MAX_ATTEMPTS:
            self._rotation.ignore(leader, trio.current_time())
        if not superseded and self.failed % MAX_ATTEMPTS == 0 and self.state.acceptor.proposal is None:
            self._skip(effect.reason)
        self._events.changed()

    def _skip(self, reason: str) -> None:
        """Skip the round: weights and progress stay, and it is due again an interval later."""
        self._taker.skip()
        self._context.exchange.postpone()
        self._rotation.skip(self.state.round)
        head = self.state.head
        self._context.host.round_ended(
            RoundReport(self.state.round, "skipped", head.lineage, parent_hash=head.state_hash, reason=reason)
        )

    # Messages, links and snapshots.

    def receive(self, sender: PeerId, message: m.Message, payload: bytes = b"") -> None:
        """Deliver a message to the consensus, or to its attempt. Raises WireError if it breaks a rule."""
        match message:
            case m.Reduce() | m.Contribution() | m.Arrived() | m.Reduced():
                pass
            case m.Call():
                self._on_call(sender, message)
            case m.Join(incarnation=incarnation) if not self._context.liveness.is_linked_as((sender, incarnation)):
                return  # from a process before a restart, or a lie
            case _:
                self._check_proofs(sender, message)
                self._receive(sender, message)
        match message:
            case m.Join(attempt=attempt):
                if attempt.leader == self._context.peer_id and attempt.counter == self.state.highest:
                    self._schedule.note_join(trio.current_time())
            case m.Roster() | m.Reduce() | m.Contribution():
                if self._member is not None and message.attempt == self._member.attempt:
                    self._to_member(self._member, sender, message, payload)
            case m.Arrived() | m.Reduced() | m.Withdraw() | m.Refuse():
                leader = self._leader
                if leader is None or message.attempt != leader.attempt:
                    return
                if isinstance(message, m.Withdraw):
                    leader.note_gone(sender, message.reason)
                elif isinstance(message, m.Refuse):
                    leader.note_gone(sender, "it follows another leader", SILENT_LEADER_S)
                else:
                    leader.deliver(sender, message)

    def _check_proofs(self, sender: PeerId, message: m.Message) -> None:
        """Raises WireError if a message of this round lacks a signature, or names voters that follow from no views."""
        state, prover = self.state, self._context.prover
        head, here = state.head, (state.head.lineage, state.round)
        called = state.proposer.called if state.proposer is not None else ()
        ours = state.proposer.attempt if state.proposer is not None and sender in called else None
        joined = state.member.attempt if state.member is not None else None

        def check(proposal: m.Proposal) -> None:
            if (proposal.record.lineage, proposal.record.round) == here:
                check_size(proposal.record)
                prover.verify_proposal(proposal, head)

        match message:
            case m.Join(view=view, ready=ready) if (message.lineage, message.round, message.attempt) == (*here, ours):
                if view is not None:
                    if (view.peer_id, view.incarnation) != (sender, message.incarnation):
                        raise WireError("a Join with the view of another peer")
                    prover.verify_view(view, head)
                if ready is not None:
                    check(ready)
            case m.Propose(proposal=proposal) if message.attempt == joined:
                check(proposal)
            case m.Ready() if message.attempt == ours:
                prover.verify_ready(sender, message)
            case m.Commit(record) if (record.lineage, record.round) == here and state.learned is None:
                prover.verify_commit(message, head.voters)

    def _on_call(self, sender: PeerId, call: m.Call) -> None:
        head, member, rotation = self.state.head, self.state.member, self._rotation
        if (call.lineage, call.round) != (head.lineage, self.state.round):
            return
        now, is_ours = trio.current_time(), sender == self._context.peer_id
        if member is not None and member.attempt.leader == sender and member.attempt < call.attempt:
            # It has not ended the attempt before: no other peer should wait for it.
            rotation.ignore(sender, now)
            if not is_ours:
                self.apply(ev.MemberFailed(member.attempt, "its leader called again before it had ended"))
        if not joins_rounds(self._context.run, self._context.exchange.run_step):
            return
        if sender in rotation.ignored(head, now):
            return
        followed = member.attempt.leader if member is not None else None
        if not is_ours and rotation.is_out_of_turn(sender, head, self.failed, now, followed):
            return
        round_trip_s = self._context.liveness.round_trip_s()
        limits = self._context.timeouts.limits(self._schedule.window_s(), round_trip_s)
        self.state = dataclasses.replace(self.state, limits=limits)
        self._receive(sender, call)
        # A stranger's, to one peer, would make that disagree with the others on who leads next.
        if sender in head.voter_ids:
            rotation.note_called(min(call.attempt.counter, self.state.highest))

    def _to_member(
        self, member: Participation, sender: PeerId, message: m.Roster | m.Reduce | m.Contribution, payload: bytes
    ) -> None:
        if isinstance(message, m.Contribution):
            with self._containing(member):
                member.contribute(sender, message, payload)
        elif sender == member.attempt.leader:
            if isinstance(message, m.Roster):
                check_roster(message)
                self._context.averaging.check_plan(message, self._context.grid)
            member.deliver(message)

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        if self._member is not None:
            with self._containing(self._member):
                self._member.note_lost(peer_id)
        if self._leader is not None:
            self._leader.note_gone(peer_id, "it was lost")
        self.apply(ev.Lost(peer_id))
        self._events.changed()

    def exclude_stalled(self) -> None:
        """Exclude members that send nothing, or leave the attempt of a lost leader; called a few times a second."""
        if self._member is None:
            return
        if not self._context.liveness.is_linked(self._member.attempt.leader):
            self.note_lost(self._member.attempt.leader)
        if self._member is not None:
            with self._containing(self._member):
                self._member.give_up_stalled()

    @contextlib.contextmanager
    def _containing(self, member: Participation) -> Iterator[None]:
        """Turn an unexpected error into the failure of this attempt."""
        try:
            yield
        except WireError:
            raise
        except Exception as error:
            self._context.errors.note(f"attempt {member.attempt.counter} ended for us", error)
            self.apply(ev.MemberFailed(member.attempt, f"unexpected error: {error!r}"))

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Use the snapshot that the training thread has taken."""
        # One that was requested before the head changed belongs to no round any more.
        if snapshot.epoch == Epoch(self.state.head.lineage, self.state.head.round):
            what = f"taking the snapshot of round {self.state.round}"
            with self._context.errors.containing(what, "this peer joins without one"):
                self._taker.arrive(snapshot)
