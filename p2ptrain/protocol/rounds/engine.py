"""The round protocol at one peer: when a round is due, who leads, who takes part, and what was decided.

One engine per training peer. Messages come in through `deliver`; everything that waits runs in tasks of the engine's
own nursery. The training thread is met only through the exchange: it is asked for a snapshot, and handed a landing.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from p2ptrain.algorithms.codec import Codec
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.exchange import Exchange
from p2ptrain.protocol.exchange_types import Epoch, Landing, RoundReport, Snapshot
from p2ptrain.protocol.faults import Faults
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.parts import KEEP_ALL_S, PartStore
from p2ptrain.protocol.rounds.ballot import Ballot
from p2ptrain.protocol.rounds.codecs import gradient_codec, mean_codec
from p2ptrain.protocol.rounds.contribution import OwnContribution, check_record
from p2ptrain.protocol.rounds.fetching import RecordFetcher
from p2ptrain.protocol.rounds.homecoming import Homecoming
from p2ptrain.protocol.rounds.leader import Leader, RoundTimeoutError
from p2ptrain.protocol.rounds.lineage import LineageWatch, new_lineage
from p2ptrain.protocol.rounds.member import Participation
from p2ptrain.protocol.rounds.pace import Pace
from p2ptrain.protocol.rounds.preparation import Preparation
from p2ptrain.protocol.rounds.presence import Presence
from p2ptrain.protocol.rounds.turn import Turn
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import (
    Abort,
    Arrived,
    Attempt,
    Call,
    Commit,
    Contribution,
    Due,
    Head,
    Join,
    Leave,
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
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)

# Attempts at one round before it is skipped (DESIGN.md).
MAX_ATTEMPTS = 3
# How often we look who has stalled; when that is late by more, it was us, and by much more, we were paused.
STALL_POLL_S, HELD_UP_S, PAUSED_S = 0.25, 1.0, 10.0
# Due, and nobody calls: say it again, to the next leader in line.
DUE_AGAIN_S = 3.0
# One who is alone lets a round wait this long for joiners. 124M parameters and a moment come in 90 s at 100 Mbit/s, in
# a quarter of an hour at 10 Mbit/s.
JOINERS_PATIENCE_S = 1000.0


class EngineHost(Protocol):
    """What the engine needs of its node."""

    peer_id: PeerId
    incarnation: str
    run: RunConfig
    links: Links
    compute: Compute
    faults: Faults

    def trainers(self) -> Sequence[PeerId]:
        """Live peers that train in this run and hold its state."""
        ...

    def joiners(self) -> Sequence[PeerId]:
        """Live peers that have no state yet."""
        ...

    def departed(self, peer_id: PeerId) -> bool:
        """Whether a peer said that it leaves."""
        ...

    def round_ended(self, report: RoundReport) -> None: ...

    def fall_behind(self, reason: str) -> None:
        """The engine cannot follow by records any more: replace the whole state."""
        ...


class RoundEngine:
    """Owns the head, the ballot and this peer's contribution. See the package docstring for who does what."""

    def __init__(self, host: EngineHost, exchange: Exchange, state: AnchorState, rng: random.Random) -> None:
        self.head = Head("", "", -1, "", "", (), 0, 0, None)
        self.ballot = Ballot()
        self.parts = PartStore(host.links, host.compute)
        self.phase = "training"
        self.state = state
        self.exchange = exchange
        self.codec = gradient_codec(host.run)
        self._host = host
        self._rng = rng
        self._turn = Turn()
        self._presence = Presence(host)
        self._lineage_watch = LineageWatch(self._presence)
        self.pace = Pace(peer_timeout_s=host.links.peer_timeout_s, round_timeout_s=host.run.round_timeout_s)
        self._deferred: dict[type[Message], tuple[PeerId, Message]] = {}
        self._preparation = Preparation(host.run, exchange, state, host.links, host.compute, host.faults)
        self._homecoming = Homecoming(host.run, host.peer_id, exchange, state, self.parts, host.compute)
        self._attempts_failed = 0
        self._leader: Leader | None = None
        self._fetcher = RecordFetcher(self.parts, host.compute)
        self._participation: Participation | None = None
        self._resolving = False
        self._leaving = False
        self._changed = trio.Event()
        self._due_from_s = 0.0
        self._nursery: trio.Nursery | None = None
        exchange.on_due = self._wake
        exchange.on_snapshot = self._on_snapshot

    async def run_forever(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drive rounds until cancelled. Messages may be delivered as soon as it has started."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._lineage_watch.excuse()
            nursery.start_soon(self._watch_stalls)
            task_status.started()
            await self._drive()

    # --- what leader and member need of us ------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return self._host.peer_id

    @property
    def incarnation(self) -> str:
        return self._host.incarnation

    @property
    def run(self) -> RunConfig:
        return self._host.run

    @property
    def links(self) -> Links:
        return self._host.links

    @property
    def compute(self) -> Compute:
        return self._host.compute

    @property
    def num_blocks(self) -> int:
        return self.state.num_blocks

    def tell(self, peer_id: PeerId, message: Message) -> None:
        """Send a control message, also to ourselves; lost when the peer is not linked."""
        if peer_id == self.peer_id:
            self.deliver(peer_id, message)
        elif (link := self.links.get(peer_id)) is not None:
            link.send(message)

    def live(self) -> Sequence[PeerId]:
        return self._host.trainers()

    def note_spread(self, spread_s: float) -> None:
        self._turn.note_spread(spread_s)

    async def snapshot(self, window_s: float) -> OwnContribution | None:
        """The snapshot of this round, taken now if there is none yet; None when training does not come by in time."""
        if self._attempts_failed == 0:
            self._preparation.begin()
        return await self._preparation.take(window_s)

    def codec_of(self, record: Record) -> Codec:
        """How the mean of a record is coded."""
        return mean_codec(self.run, len(record.contributors))

    async def fetch(self, record: Record) -> None:
        """Hold all parts of a record, verified by hash and decodable.

        Raises RoundFailedError, PeerLostError or WireError.
        """
        check_record(record, self.state)
        if record.parent_sha256 != self.head.state_sha256:
            raise RoundFailedError("the record starts from another state than ours")
        assert self._nursery is not None
        await self._fetcher.fetch(record, self.codec_of(record), self._host.trainers(), self._nursery)

    # --- where we stand -------------------------------------------------------------------------------------------

    @property
    def reach(self) -> int:
        """How many voters of our head we are linked with, ourselves included."""
        return self._presence.reach(self.head)

    @property
    def busy(self) -> bool:
        """Whether the anchor is being replaced, so that it must not be read."""
        return self._homecoming.stepping

    @property
    def state_lock(self) -> trio.Lock:
        """Held while the anchor is being replaced; hold it to copy a consistent one."""
        return self._homecoming.lock

    @property
    def resolving(self) -> bool:
        """Whether an outcome is being brought home."""
        return self._resolving

    def set_head(self, head: Head) -> None:
        """Stand at this head, after founding, adopting or a committed round. Forgets votes and plans of before."""
        same_lineage = head.lineage == self.head.lineage
        self.head = head
        self._turn.begin(head, same_lineage=same_lineage)
        self.ballot = Ballot()
        self._lineage_watch.excuse()
        self._forget_snapshot()
        self._end_attempt()
        self._fetcher.cancel()
        self._wake()

    def found_lineage(self) -> None:
        """Go on alone from our head under a new lineage, as its only voter; others adopt it."""
        lineage = new_lineage(self.head.lineage, self.head.round, self.peer_id, self.incarnation)
        logger.info("the voters of lineage %s are gone: beginning lineage %s", self.head.lineage, lineage)
        self.set_head(dataclasses.replace(self.head, lineage=lineage, voters=((self.peer_id, self.incarnation),)))
        self.exchange.epoch = Epoch(lineage, self.head.round)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold rounds off while the whole state is replaced; waits until an outcome under way has landed."""
        while self._resolving:
            await self._changed.wait()
        self._resolving = self._homecoming.stepping = True
        self._end_attempt()
        try:
            async with self.state_lock:
                yield
        finally:
            self._resolving = self._homecoming.stepping = False
            self._wake()

    @property
    def finished(self) -> bool:
        """Whether the run's last round is behind us: nothing is decided any more."""
        return 0 < self.run.total_steps <= self.head.run_step

    def leave(self) -> None:
        """Begin and follow no round any more; one that is being brought home is, while we are still there."""
        self._leaving = True
        if not self._resolving:
            self._end_attempt()

    async def land(self, landing: Landing) -> None:
        """Hand a landing to the training thread and wait until it has taken effect; one at a time."""
        await self._homecoming.land(landing)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _forget_snapshot(self) -> None:
        self._attempts_failed = 0
        self._preparation.forget()

    # --- messages -------------------------------------------------------------------------------------------------

    def deliver(self, sender: PeerId, message: Message, payload: bytes = b"") -> None:
        """Take one round message. Raises WireError where it breaks the protocol; stale ones are ignored."""
        match message:
            case Call(attempt=attempt) if attempt.leader != sender:
                raise WireError("a Call in another peer's name")
            case Call() | Commit() if self._resolving:
                # Of the round after the one that is landing here: taken up once it has landed.
                self._deferred[type(message)] = (sender, message)
            case Commit(record=record):
                self._on_commit(record)
            case Due():
                self._on_due(sender, message)
            case Propose(record=record):
                if self._is_current(record.lineage, record.round):
                    self._to_participation(sender, message.attempt, message)
            case Call():
                if self._is_current(message.lineage, message.round):
                    self._on_call(sender, message)
            case Roster() | Reduce() | Abort():
                if self._is_current(message.lineage, message.round):
                    self._to_participation(sender, message.attempt, message)
            case Join() | Refuse() | Arrived() | Reduced() | Ready() | Withdraw():
                if self._leader is not None and message.attempt == self._leader.attempt:
                    self._leader.deliver(sender, message)
            case Contribution():
                participation = self._participation
                if participation is not None and message.attempt == participation.attempt:
                    participation.contribute(sender, message, payload)
            case _:
                raise WireError(f"{type(message).__name__} is no round message")

    def note_lost(self, peer_id: PeerId) -> None:
        """A link broke: whoever waits for that peer learns it now."""
        if self._participation is not None:
            self._participation.note_lost(peer_id)
        if self._leader is not None:
            self._leader.deliver(peer_id, Leave("lost"))
        self._wake()

    def _is_current(self, lineage: str, round_: int) -> bool:
        here = lineage == self.head.lineage and round_ == self.head.round + 1
        return here and not self._resolving and not self.finished and not self._leaving

    def _to_participation(self, sender: PeerId, attempt: Attempt, message: Message) -> None:
        if self._participation is not None and sender == attempt.leader and attempt == self._participation.attempt:
            self._participation.deliver(message)

    def _on_due(self, sender: PeerId, due: Due) -> None:
        if self._turn.note_due(sender, due, self.head):
            self._wake()

    def _on_call(self, sender: PeerId, call: Call) -> None:
        if not self.ballot.promise(call.attempt):
            self.tell(sender, Refuse(call.lineage, call.round, call.attempt, self.ballot.promised))
            return
        if self._participation is not None and call.attempt == self._participation.attempt:
            return
        if self._participation is not None:
            # The leader of the attempt that this one replaces would wait for us in vain.
            old = self._participation.attempt
            self.tell(old.leader, Refuse(call.lineage, call.round, old, call.attempt))
        self._end_participation()
        self._turn.counter = max(self._turn.counter, call.attempt.counter)
        assert self._nursery is not None
        self._participation = Participation(self, call)
        self._nursery.start_soon(self._participate, self._participation)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        # One that was asked for before the head moved on belongs to no round any more.
        if snapshot.epoch == Epoch(self.head.lineage, self.head.round):
            self._preparation.arrive(snapshot)

    # --- when a round is due --------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Say when we are due, lead when it is our turn, and see whether the voters are still there."""
        said_s, said_for = 0.0, ("", -2, 0)
        while True:
            changed = self._changed
            if self.head.lineage and not self._resolving and not self.finished and not self._leaving:
                now = trio.current_time()
                waits = self._awaits_joiners(now)
                if self.exchange.due and self._participation is None and not waits:
                    this = (self.head.lineage, self.head.round, self._attempts_failed)
                    if this != said_for or now - said_s > DUE_AGAIN_S:
                        self._turn.counter += this == said_for
                        said_s, said_for = now, this
                        self._say_due()
                if self._participation is None and not waits and self._is_ours_to_lead():
                    await self._lead()
                    continue
                if self._lineage_watch.has_ended(self.head, 3 * self.run.sync_every * self.exchange.step_s):
                    self.found_lineage()
            with trio.move_on_after(1.0):
                await changed.wait()

    def _awaits_joiners(self, now: float) -> bool:
        """Alone, a round had better wait for peers that are taking over the state, as it would change under them.

        Only alone: where there are others to agree with, a slow joiner holds nobody up.
        """
        if not self.exchange.due:
            self._due_from_s = now
        if self.exchange.at_length or self._host.trainers() or not self._host.joiners():
            return False
        return now - self._due_from_s < JOINERS_PATIENCE_S

    def _is_ours_to_lead(self) -> bool:
        presence, head = self._presence, self.head
        return self._turn.is_ours(self.peer_id, head, presence.present(), presence.reaches(head))

    def _say_due(self) -> None:
        due = Due(self.head.lineage, self.head.round + 1, self._turn.counter)
        for peer_id in (self.peer_id, *self._host.trainers()):
            self.tell(peer_id, due)

    async def _lead(self) -> None:
        attempt = Attempt(max(self.ballot.promised.counter, self._turn.counter) + 1, self.peer_id)
        round_trip_s = max((link.rtt_s for link in self.links.live.values()), default=0.0)
        attempt_s = self.pace.attempt_s()
        self._leader = Leader(
            self, attempt, window_s=self._window_s(), attempt_s=attempt_s, round_trip_s=round_trip_s
        )  # fmt: skip
        try:
            with self._leader.scope:
                record = await self._leader.run()
                logger.debug("round %d committed by attempt %d", record.round, attempt.counter)
        except RoundFailedError as error:
            logger.info("round %d, attempt %d: %s", self.head.round + 1, attempt.counter, error)
            if isinstance(error, RoundTimeoutError):
                # The next one gets several times as long, up to the user's bound.
                self.pace.note_round(attempt_s)
            # Two leaders that got into each other's way must not meet again.
            await trio.sleep(self._rng.uniform(0.05, 0.3))
        finally:
            self._leader = None

    def _window_s(self) -> float:
        speeds = [beat.speed for beat in self._presence.beats().values()]
        return self._turn.window_s(self.run.sync_every, self.exchange.step_s, speeds)

    # --- taking part ----------------------------------------------------------------------------------------------

    async def _participate(self, participation: Participation) -> None:
        call = participation.call
        with participation.scope:
            try:
                await participation.run()
                raise RoundFailedError("the leader began anew within its attempt")
            except* (RoundFailedError, PeerLostError, WireError) as errors:
                reason = _innermost(errors)
                logger.debug("round %d, attempt %d: %s", call.round, call.attempt.counter, reason)
                self.tell(call.attempt.leader, Withdraw(call.lineage, call.round, call.attempt, reason))
                self._end_participation()
                self._attempts_failed += 1
                if self._attempts_failed >= MAX_ATTEMPTS and self.ballot.ready is None:
                    self._skip(reason)
                self._wake()

    def _end_participation(self) -> None:
        if self._participation is not None:
            self._participation.scope.cancel()
            self._participation = None
            self.phase = "training"

    def _end_attempt(self) -> None:
        """Whatever we took part in or led is over: the round is decided."""
        self._end_participation()
        if self._leader is not None:
            self._leader.scope.cancel()

    def _skip(self, reason: str) -> None:
        """Nothing changes but the time of the next round; what was learnt stays in the weights."""
        self._forget_snapshot()
        self.exchange.postpone()
        self._turn.skip(self.head.round + 1)
        head = self.head
        self._host.round_ended(
            RoundReport(head.round + 1, "skipped", head.lineage, parent_sha256=head.state_sha256, reason=reason)
        )

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
            if self._participation is not None and not excused:
                if not self._presence.is_linked(self._participation.attempt.leader):
                    self._participation.note_lost(self._participation.attempt.leader)
                self._participation.give_up_stalled()

    # --- the outcome ----------------------------------------------------------------------------------------------

    def _on_commit(self, record: Record) -> None:
        if self._is_current(record.lineage, record.round):
            self._resolving = True
            assert self._nursery is not None
            self._nursery.start_soon(self._resolve, record)

    async def adopt_record(self, record: Record) -> None:
        """Bring a committed record home that we missed. Returns once it has landed; ignored if it is not the next."""
        if self._is_current(record.lineage, record.round):
            self._resolving = True
            await self._resolve(record)

    async def _resolve(self, record: Record) -> None:
        """Fetch what is missing, step the anchor, land; what cannot be had any more ends in `fall_behind`."""
        self._end_attempt()
        try:
            await self.fetch(record)
            await self._bring_home(record)
        except (RoundFailedError, PeerLostError, WireError) as error:
            self._host.fall_behind(f"round {record.round} cannot be adopted: {error}")
        finally:
            self._resolving = self._homecoming.stepping = False
            self.phase = "training"
            self._wake()
        deferred, self._deferred = self._deferred, {}
        for sender, message in deferred.values():
            # A leader that was lost meanwhile calls nobody any more.
            if self._presence.is_linked(sender):
                self.deliver(sender, message)

    async def _bring_home(self, record: Record) -> None:
        """Take the outer step, land it, and say so."""
        self.phase = f"round {record.round}: landing"
        ours = (self.peer_id, self.incarnation)
        included = self._preparation.own is not None and ours in (
            (c.peer_id, c.incarnation) for c in record.contributors
        )

        def stand_at(head: Head) -> None:
            if self._preparation.own is not None:
                self.pace.note_round(self._preparation.spent().wall_s)
            self.set_head(head)

        report = await self._homecoming.bring(
            record, self.codec_of(record), self._preparation, included=included, stand_at=stand_at
        )
        assert self._nursery is not None
        self._nursery.start_soon(self._trim_later, record)
        self._host.round_ended(report)

    async def _trim_later(self, record: Record) -> None:
        await trio.sleep(KEEP_ALL_S)
        # Not while an attempt is under way or undecided, whose parts are in the same store.
        if not (self._participation or self.ballot.ready or self._resolving or self._fetcher.needed):
            self.parts.trim(record, self.peer_id)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
