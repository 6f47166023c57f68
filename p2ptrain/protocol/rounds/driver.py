"""The rounds of one peer: its head, and what happens next.

One driver per training peer. Messages come in through `deliver`. The driver's own nursery holds two loops, which act
when it is time, and the tasks of `Attempts`, `Committer` and `RecordFetcher`, which contain their errors: an attempt
costs that attempt, a decided round that cannot be applied costs a download of the state.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import trio

from p2ptrain.protocol.exchange.types import Epoch, Snapshot
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import HELD_UP_S
from p2ptrain.protocol.rounds.attempts import Attempts
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.events import State, Tick, deadline_s
from p2ptrain.protocol.rounds.deciding.history import History, lineage_of
from p2ptrain.protocol.rounds.deciding.lineage import PastHeads
from p2ptrain.protocol.rounds.deciding.policy import MARGIN, MARGIN_OF_OTHERS, may_be_drawn, rank
from p2ptrain.protocol.rounds.deciding.proof import HeadVotes
from p2ptrain.protocol.rounds.deciding.record import check_join
from p2ptrain.protocol.rounds.deciding.timeouts import PeerBackoff
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.rounds.landing.commit import Committer
from p2ptrain.protocol.rounds.lineage_watch import LineageWatch
from p2ptrain.protocol.rounds.moving.audit import Audited
from p2ptrain.protocol.rounds.moving.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.rotation import LeaderRotation
from p2ptrain.protocol.rounds.schedule import Schedule
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Calls and Commits that are kept while a round lands: the last of each kind from each peer.
MAX_DEFERRED = 64
# How often we look whether a round is due, where no event says so.
POLL_S = 1.0
# How often we look who has stalled; when that is late by more than HELD_UP_S, it was us, and by more than PAUSED_S, we
# were paused.
STALL_POLL_S, PAUSED_S = 0.25, 10.0
# Longest time for which a partner's claims to be ahead are ignored (guess).
MAX_IGNORED_S = 60.0
NO_HEAD = m.Head("", "", -1, "", "", (), 0, 0, None)


class RoundDriver:
    """Holds the head, decides when to call a round, and gives each round message to the part that takes it.

    Implements `RoundEvents`.

    Attributes:
        past_heads: the heads that we had; `adopt` takes only those that it allows.
        history: the run's history up to our head, as far as we know it.
        committer: applies decided rounds.
    """

    def __init__(self, context: RoundContext, rng: random.Random) -> None:
        self.context = context
        self.past_heads = PastHeads()
        self.history = History()
        # Partners whose claims to be ahead in our lineage brought nothing, and those of lineages that we did not adopt.
        self._futile, self._refused = PeerBackoff(MAX_IGNORED_S), PeerBackoff(MAX_IGNORED_S)
        self._exchange = context.exchange
        self._taker = SnapshotTaker(context)
        self.committer = Committer(context, NO_HEAD, self._taker, self)
        self._rotation = LeaderRotation(context)
        self._schedule = Schedule(context, self._rotation, rng)
        self._attempts = Attempts(context, NO_HEAD, self._taker, self._schedule, self._rotation, self.committer, self)
        self._lineage_watch = LineageWatch(context.liveness)
        self._head_votes = HeadVotes(context.prover, context.liveness.own)
        self._landed: m.Landed | None = None
        self._leaving = False
        self._is_following = False
        self._deferred: dict[tuple[PeerId, type[m.Message]], m.Message] = {}
        self._changed = trio.Event()

    async def run_forever(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drive rounds until cancelled. Messages may be delivered as soon as it has started."""
        async with trio.open_nursery() as nursery:
            self.context.nursery = nursery
            self._lineage_watch.reset(trio.current_time())
            nursery.start_soon(self._watch_stalls)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self.context.pushed.push_forever)
            task_status.started()
            try:
                await self._drive()
            finally:
                self.context.nursery = None

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Use the snapshot that the training thread has taken."""
        self._attempts.take_snapshot(snapshot)

    def changed(self) -> None:
        """There may be something new to do, or to wait for."""
        self._changed.set()
        self._changed = trio.Event()

    @property
    def head(self) -> m.Head:
        """The last resolved round, and the voters of the next."""
        return self.round_state.head

    @property
    def round_state(self) -> State:
        """The state of the round after the head."""
        return self._attempts.state

    @property
    def status(self) -> str:
        """What this peer is doing now, for people."""
        stage = self._attempts.stage
        if self.committer.resolving and self.round_state.learned is not None:
            stage = "landing"
        return f"round {self.round_state.round}: {stage}" if stage else "training"

    @property
    def is_busy(self) -> bool:
        """Whether a round uses the weights: an attempt runs, our snapshot is taken, or a round is being applied."""
        state = self.round_state
        deciding = state.member is not None or state.proposer is not None or state.learned is not None
        return deciding or self.committer.resolving or self._taker.own is not None

    @property
    def _is_active(self) -> bool:
        """Not while a round is applied or the state replaced, after the run's last round, or when we leave."""
        finished = self.context.run.is_over_at(self.head.run_step)
        return not (self.committer.resolving or finished or self._leaving)

    # The head.

    @property
    def has_ended(self) -> bool:
        """Whether the voters of our head are gone for good, so that another lineage must follow."""
        return self._lineage_watch.has_ended(self.head)

    @property
    def given_up(self) -> frozenset[Voter]:
        """The linked voters that hang, once this peer has waited for them for long enough to go on without them."""
        return self._lineage_watch.given_up(self._patience_s, trio.current_time())

    def may_follow(self, link: Link) -> bool:
        """Whether a partner claims a state that we could adopt, and no such claim of it has failed lately."""
        beat, head = link.beat, self.head
        if beat is None or not beat.lineage or self._ignored(link).is_backed_off(link.peer_id, trio.current_time()):
            return False
        # The round that is landing now is not one that we lack.
        return beat.lineage != head.lineage or beat.round > head.round + self.committer.resolving

    def ignore_claims(self, link: Link, least_s: float) -> None:
        """A partner's claim brought nothing: ignore claims of its kind for this time, twice as long each time."""
        self._ignored(link).note(link.peer_id, trio.current_time(), least_s)

    def trust_claims(self, peer_id: PeerId) -> None:
        """A partner's claim was true."""
        self._futile.forget(peer_id)
        self._refused.forget(peer_id)

    def _ignored(self, link: Link) -> PeerBackoff:
        """Of its kind: an honest partner of a lineage that we did not adopt may join ours."""
        return self._refused if link.beat is not None and link.beat.lineage != self.head.lineage else self._futile

    def _set_head(self, head: m.Head, votes: Sequence[m.Vote] = ()) -> None:
        """Go on from this head, which `past_heads.may_adopt` must allow. Forgets votes and plans."""
        assert self.past_heads.may_adopt(head), f"{head.lineage}/{head.round} was our head before"
        self.past_heads.note(head)
        self.context.recent = self.context.recent.after(head)
        self.context.set_grid(head)
        same_lineage = head.lineage == self.head.lineage
        self._attempts.begin(head)
        self._rotation.begin(head, self.history.entries, same_lineage=same_lineage)
        self._schedule.begin(trio.current_time(), same_lineage=same_lineage)
        self._lineage_watch.reset(trio.current_time())
        self.committer.begin(head)
        self._landed = self._head_votes.begin(head, votes)
        for link in self.context.links.trainers():
            self.introduce(link)
        if self._landed is not None:
            self._head_votes.note(self.context.peer_id, self._landed)
        self.changed()

    def advance(self, head: m.Head) -> None:
        """Go on from the head after a committed round."""
        self.history.add(m.Entry(head.commit, None))
        self._set_head(head)

    def adopt(self, signed: m.SignedHead, history: History) -> None:
        """Go on from another peer's head, whose state we have; both have been checked."""
        self.history = history
        self._set_head(signed.head, signed.votes)

    def found_run(self) -> None:
        """Begin a run with the state that we have, as its only voter."""
        context = self.context
        founding = context.prover.founding(context.run.digest, -1, context.state.hashes.state)
        self.history = History(founding, [m.Entry(None, founding)])
        genesis, hashes = lineage_of(founding), context.state.hashes
        voters = (context.liveness.own,)
        self._set_head(m.Head(genesis, genesis, -1, hashes.state, hashes.anchor, voters, 0, 0, None))

    @property
    def founder(self) -> PeerId:
        """The id of the peer that founded the run; "" before we have its state."""
        return self.history.genesis.founder if self.history.genesis is not None else ""

    def found_lineage(self, head: m.Head, history: History, why: str) -> None:
        """Go on alone from this head, where `history` ends, in a new lineage that others may adopt; `why` is logged."""
        founding = self.context.prover.founding(head.lineage, head.round, head.state_hash)
        lineage = lineage_of(founding)
        place = f" from round {head.round}" if head.round >= 0 else ""
        logger.info("%s: going on%s, in lineage %s", why, place, lineage)
        self.history = history
        self.history.add(m.Entry(None, founding))
        self._set_head(msgspec.structs.replace(head, lineage=lineage, voters=(self.context.liveness.own,)))
        self._exchange.epoch = Epoch(lineage, head.round)
        self.context.links.announce()  # Others at that head adopt it, instead of beginning another one.

    def introduce(self, link: Link) -> None:
        """Send a peer our signature under our head."""
        if self._landed is not None:
            link.send(self._landed)

    @property
    def signed_head(self) -> m.SignedHead | None:
        """Our head with the signatures of a quorum of its voters; None until we have those."""
        votes, genesis = self._head_votes.quorum, self.history.genesis
        return m.SignedHead(self.head, votes, genesis) if votes is not None and genesis is not None else None

    def last_commit(self, lineage: str, round_: int) -> m.Commit | None:
        """The last committed round, if it is this one."""
        commit = self.head.commit
        is_it = commit is not None and (commit.record.lineage, commit.record.round) == (lineage, round_)
        return commit if is_it else None

    @contextmanager
    def following(self) -> Iterator[None]:
        """While another start's state is downloaded, take part in no first round: after it we would keep ours."""
        self._is_following = True
        try:
            yield
        finally:
            self._is_following = False
            self.changed()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold rounds off while the whole state is replaced; waits until a round that is being applied has landed."""
        async with self.committer.suspended():
            self._attempts.give_up("its state is being replaced")
            await self._taker.unused()
            async with self.committer.lock:
                yield

    def leave(self) -> None:
        """Take part in no round any more. One that is being applied still lands, if there is time."""
        self._leaving = True
        if not self.committer.resolving:
            self._attempts.give_up("this peer leaves")

    async def adopt_commit(self, sender: PeerId, commit: m.Commit) -> None:
        """Apply a round that we missed, which another peer gave us. Returns once it has landed, or failed.

        Returns at once if it is not the next round. Raises WireError if it is not proven.
        """
        head = self.head
        self.deliver(sender, commit)
        while self.head is head and self.committer.resolving:
            await self._changed.wait()

    def is_candidate(self, peer_id: PeerId) -> bool:
        """Whether a peer is a voter of the next round, or likely drawn for it."""
        return peer_id in self.head.voter_ids or self._is_drawn(peer_id, MARGIN)

    def may_be_candidate(self, peer_id: PeerId) -> bool:
        """Whether another peer may think that this one is a voter of the next round, or is drawn for it."""
        return peer_id in self.head.voter_ids or self._is_drawn(peer_id, MARGIN_OF_OTHERS)

    def _is_drawn(self, peer_id: PeerId, margin: float) -> bool:
        size, most = self.context.swarm_size(), self.context.run.max_contributors
        if size <= most:
            return True
        return may_be_drawn(rank(self.head.state_hash, peer_id), most, size, margin)

    # Messages and links.

    def deliver(self, sender: PeerId, message: m.Message, payload: bytes = b"") -> None:
        """Take one round message. Raises WireError where it breaks the protocol; stale ones are ignored."""
        if isinstance(message, m.Join):
            check_join(message)
        match message:
            case m.Mean():
                self.context.pushed.receive(sender, message, payload)
            case m.Landed():
                self._head_votes.note(sender, message)
                self.changed()
            case m.Call() if self._holds_back(trio.current_time()):
                pass
            case m.Call() | m.Commit() if self.committer.resolving or self._is_one_ahead(message):
                # Of the round after the one that is about to be applied: delivered once that has landed.
                if (sender, type(message)) in self._deferred or len(self._deferred) < MAX_DEFERRED:
                    self._deferred[sender, type(message)] = message
            case m.Accuse():
                audited = self.committer.audits.accepts(sender, message)
                if audited is not None:
                    self.context.start_soon(self._check_accusation, sender, audited)
            case m.Due():
                if self._rotation.note_due(sender, message, self.head, trio.current_time()):
                    self.changed()
            case _ if self._is_active:
                self._attempts.receive(sender, message, payload)

    async def _check_accusation(self, sender: PeerId, audited: Audited) -> None:
        with self.context.errors.containing("checking an accusation", "it is ignored"):
            await self.committer.audits.check(sender, audited)

    def _is_one_ahead(self, message: m.Call | m.Commit) -> bool:
        of = message if isinstance(message, m.Call) else message.record
        return (of.lineage, of.round) == (self.head.lineage, self.round_state.round + 1)

    def resolved(self) -> None:
        """A round has landed or failed, or the state was replaced: deliver what came meanwhile."""
        self.changed()
        deferred, self._deferred = self._deferred, {}
        for (sender, _), message in deferred.items():
            # Not the Call of a leader that was lost meanwhile.
            link = self.context.links.get(sender)
            if link is not None:
                with self.context.links.containing(link, f"taking a deferred {type(message).__name__}"):
                    self.deliver(sender, message)

    def note_lost(self, peer_id: PeerId) -> None:
        """A link broke: whoever waits for that peer learns it now."""
        self._head_votes.note_lost(peer_id)
        self._attempts.note_lost(peer_id)

    # Time.

    async def _drive(self) -> None:
        """Announce that we are due, lead when it is our turn, and watch whether the voters are still there."""
        while True:
            changed, wake_s = self._changed, POLL_S
            if self.head.lineage:
                try:
                    self._lineage_watch.note_steps(self.head, self._rotation.due_for(self.head), trio.current_time())
                    if self._is_active:
                        wake_s = self._act(trio.current_time())
                    else:
                        self._lineage_watch.sees_quorum(self.head, trio.current_time())
                except Exception as error:
                    # Our bug. The next poll tries again.
                    self.context.errors.note("driving the next round failed", error)
                    changed = trio.Event()
            with trio.move_on_after(wake_s):
                await changed.wait()

    def _act(self, now: float) -> float:
        """Retry a decided round, call the next one, or begin a lineage. Returns the seconds until the next call."""
        wake_s, state = POLL_S, self.round_state
        self._schedule.note_time(now)
        if state.learned is not None:
            self.committer.retry(state.learned, now)
            if self.committer.resolving:
                return wake_s
        elif not self._waits(now):
            is_free = state.member is None and state.proposer is None
            # Also in an attempt, as one that is not due and makes no steps is taken to hang.
            self._announce(now, again=is_free)
            if is_free:
                wake_s = self._lead(now)
        patience_s = self._patience_s
        ours = self._lineage_watch.is_our_turn(
            self.head,
            patience_s,
            now,
            takes_turns=self.is_candidate,
            awaits=lambda: any(map(self.may_follow, self.context.links.trainers())),
        )
        # Pairs need no voters: with them, a lineage is not missed before its round is due.
        is_missed = not self.context.run.is_pairwise or self._exchange.round_due
        # Who does not take part in the round is not linked with its voters.
        may_found = is_missed and self.is_candidate(self.context.peer_id)
        if may_found:
            self._lineage_watch.tell(self.head, patience_s, now)
        if ours and may_found and not self.committer.interrupted:
            self.found_lineage(self.head, self.history, self._lineage_watch.why(self.head, now))
        return wake_s

    @property
    def _patience_s(self) -> float:
        """How long voters that fell silent are waited for if that is more than a minute: three intervals.

        Who waits for the run's last round does not train, and waits at most for half of the time that is left for that
        round. Not less: it may be cut off, and would end the run without the others.
        """
        run, exchange = self.context.run, self._exchange
        three_intervals_s = 3 * run.sync_every * exchange.step_s
        if not exchange.at_length:
            return three_intervals_s
        left_s = max(0.0, run.round_timeout_s - self._schedule.at_length_for_s(trio.current_time()))
        # A peer that was restarted at the end does not know how long an interval takes.
        return min(three_intervals_s or math.inf, left_s / 2)

    def _waits(self, now: float) -> bool:
        is_landing = self._head_votes.is_landing(self.context.liveness.present())
        return self._holds_back(now) or self._schedule.waits(self.head, now, is_landing=is_landing)

    def _holds_back(self, now: float) -> bool:
        return self._is_following and self._schedule.may_hold_back(self.head, now)

    def _announce(self, now: float, *, again: bool) -> None:
        due = self._schedule.due(self.head, self._attempts.failed, now, again=again)
        if due is not None:
            for peer_id in (self.context.peer_id, *self.context.host.lineage_peers()):
                self._attempts.tell(peer_id, due)

    def _lead(self, now: float) -> float:
        if not self._schedule.is_ours_to_lead(self.head, self._attempts.failed, now):
            return POLL_S
        delay_s = self._schedule.delay_s(now)
        if delay_s > 0:
            return delay_s
        self._attempts.apply(self._schedule.lead(self.head, self._attempts.failed, now))
        return POLL_S

    async def _keep_time(self) -> None:
        """Tell the consensus when one of its deadlines has passed."""
        while True:
            changed = self._changed
            with trio.move_on_at(deadline_s(self.round_state)):
                await changed.wait()
            if trio.current_time() >= deadline_s(self.round_state):
                self._attempts.apply(Tick())
                if trio.current_time() >= deadline_s(self.round_state):
                    await trio.sleep(STALL_POLL_S)  # it failed

    async def _watch_stalls(self) -> None:
        skip = False
        while True:
            slept_from_s = trio.current_time()
            await trio.sleep(STALL_POLL_S)
            # When we were held up ourselves, what others sent meanwhile waits to be read.
            slept_s = trio.current_time() - slept_from_s
            skip = slept_s > HELD_UP_S and not skip
            if slept_s > PAUSED_S:
                self._lineage_watch.reset(trio.current_time())
            if not skip:
                self._attempts.exclude_stalled()
