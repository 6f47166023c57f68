"""Taking part in one attempt: join, send our outer gradient to the reducers and reduce our part, fetch the outcome.

A participation begins with `Prepare` from the consensus, and ends when `Attempts` cancels its scope, or on an error.
The next attempt uses the same snapshot and sends the same bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator

import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.links.link import BULK_FROM_BYTES
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import AttemptEvents, RoundContext
from p2ptrain.protocol.rounds.deciding.events import Fetch, Held, MemberFailed, Prepared
from p2ptrain.protocol.rounds.deciding.guard import SpanNorms
from p2ptrain.protocol.rounds.deciding.policy import drawn, parts_of
from p2ptrain.protocol.rounds.deciding.record import check_company, check_join, check_pace, expected, name_of
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_REDUCER_S
from p2ptrain.protocol.rounds.deciding.voters import seen_of
from p2ptrain.protocol.rounds.moving.collection import EarlyChunks
from p2ptrain.protocol.rounds.moving.fetch import RecordFetcher, UnusableMeanError
from p2ptrain.protocol.rounds.moving.reducer import Reducer
from p2ptrain.protocol.rounds.moving.snapshot import CHUNKS_PER_VISIT, OwnContribution, SnapshotTaker
from p2ptrain.protocol.wire.messages import (
    MAX_VOTERS,
    Attempt,
    Contribution,
    Head,
    Join,
    Record,
    Reduce,
    Roster,
    View,
)
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# More than an honest leader sends in one attempt: a Roster, a Reduce and a Propose.
MAX_ORDERS = 8
# A reported record that names too few is accepted after it was refused for so long (guess): no other one came through.
GIVE_IN_S = 60.0

Order = Roster | Reduce | Fetch


class Sender:
    """Sends the chunks of our outer gradient.

    Args:
        reducer: takes our own chunks of the part that we reduce; None if we reduce none.

    Attributes:
        num_chunks, num_sent: chunks to send in all, and those sent.
    """

    def __init__(self, context: RoundContext, roster: Roster, taker: SnapshotTaker, reducer: Reducer | None) -> None:
        """The roster has been checked."""
        self._context = context
        self._roster = roster
        self._taker = taker
        self._reducer = reducer
        self._encoded, self._sealed = trio.Event(), trio.Event()
        self._to_send = sorted(parts_of(roster.members, roster.parts)[context.peer_id])
        self._parts_left = set(range(len(roster.parts)))
        self.num_chunks = sum(len(self._chunks_of(part)) for part in self._to_send)
        self.num_sent = 0
        self._others = {part for part in self._to_send if roster.parts[part].reducer != context.peer_id}
        self._sent = set[int]()
        self._began_s = trio.current_time()

    async def send(self) -> None:
        """Encode our outer gradient and stream each of our parts to its reducer, to all reducers at once.

        Raises RoundFailedError or PeerLostError.
        """
        own = self._taker.own
        if own is None:
            raise RoundFailedError("on the roster without a snapshot")
        async with trio.open_nursery() as nursery:
            for number in self._to_send:
                nursery.start_soon(self._send_part, number, own)
            for visit in self._visits():
                if any(start not in own.chunks for start, _ in visit):
                    await self._taker.encode(visit)
                self._encoded.set()
                self._encoded = trio.Event()
            if self._context.audited and own.tree is None:
                compute, bounds = self._context.compute, self._context.grid.chunks
                await compute(own.seal, await in_parallel(compute, own.leaf, bounds))
            elif not self._context.averaging.reduces:
                await self._context.compute(own.make_digest)
            self._sealed.set()

    @property
    def unsent_s(self) -> float:
        """How long we have been sending, if we still have chunks for most other reducers; else 0."""
        unsent = (self._others & self._parts_left) - self._sent
        return trio.current_time() - self._began_s if 2 * len(unsent) > len(self._others) else 0.0

    def _chunks_of(self, number: int) -> list[tuple[int, int]]:
        part = self._roster.parts[number]
        return self._context.grid.bounds(part.start, part.stop)

    def _visits(self) -> Iterator[list[tuple[int, int]]]:
        """Chunks to encode at a time, round-robin over the parts, so that no reducer waits."""
        most = CHUNKS_PER_VISIT * self._context.compute.threads
        lanes = [deque(chunks) for chunks in dict.fromkeys(tuple(self._chunks_of(number)) for number in self._to_send)]
        while lanes:
            for lane in lanes:
                yield [lane.popleft() for _ in range(min(most, len(lane)))]
            lanes = [lane for lane in lanes if lane]

    async def _send_part(self, number: int, own: OwnContribution) -> None:
        context, reducer, encoded = self._context, self._roster.parts[number].reducer, own.chunks
        part, attempt = self._roster.parts[number], (self._roster.lineage, self._roster.round, self._roster.attempt)
        link = context.links.get(reducer)
        try:
            if link is None and reducer != context.peer_id:
                raise PeerLostError(f"reducer {reducer} is not linked")
            for start, stop in self._chunks_of(number):
                while start not in encoded:
                    await self._encoded.wait()
                message = Contribution(*attempt, start, stop, b"", ())
                if stop == part.stop:
                    await self._sealed.wait()
                    if own.tree is not None:
                        proof = own.tree.proof(*context.grid.numbers(part.start, part.stop))
                        message = Contribution(*attempt, start, stop, own.tree.root, proof)
                if link is None:
                    assert self._reducer is not None
                    self._reducer.collect(context.peer_id, message, encoded[start], checked=True)
                else:
                    # A copy: it may wait in the queue when the outer step overwrites the chunk.
                    await link.send_bulk(message, bytes(encoded[start]), Traffic.ROUND, compress=True)
                self.num_sent += 1
            self._sent.add(number)
        except PeerLostError:
            self._parts_left.remove(number)
            if not context.averaging.is_complete(self._roster.parts, self._parts_left):
                raise


class Participation:
    """An attempt that we take part in. Run `run` in a task; cancel `scope` when the attempt has ended.

    Args:
        fetcher: fetches the parts of the record that is proposed.
    """

    def __init__(
        self,
        context: RoundContext,
        attempt: Attempt,
        head: Head,
        taker: SnapshotTaker,
        fetcher: RecordFetcher,
        events: AttemptEvents,
    ) -> None:
        self.attempt = attempt
        self.scope = trio.CancelScope()
        self._context = context
        self._head = head
        self._taker = taker
        self._fetcher = fetcher
        self._events = events
        self._orders_send, self._orders = trio.open_memory_channel[Order](MAX_ORDERS)
        self._early = EarlyChunks(context.codec, context.grid)
        self._has_roster = False
        # None, as the reducer, if the roster has no place for us.
        self._sender: Sender | None = None
        self._reducer: Reducer | None = None
        self._fetching = self._held = False

    @property
    def stage(self) -> str:
        """What we are doing, as text."""
        if self._held:
            return "agreeing"
        if self._fetching:
            return "fetching the mean"
        if not self._has_roster:
            return "gathering"
        if self._sender is None or self.has_sent:
            return "averaging"
        return f"sending {self._sender.num_sent}/{self._sender.num_chunks}"

    @property
    def has_sent(self) -> bool:
        """Whether we have sent our whole outer gradient."""
        return self._sender is not None and self._sender.num_sent == self._sender.num_chunks

    @property
    def unsent_s(self) -> float:
        """As of `Sender`; 0 before the roster, and once we fetch the mean."""
        return 0.0 if self._sender is None or self._fetching else self._sender.unsent_s

    def deliver(self, order: Order) -> None:
        """Queue an order of the leader or of the consensus."""
        try:
            self._orders_send.send_nowait(order)
        except trio.WouldBlock:
            logger.warning("the leader of attempt %d sends too many orders", self.attempt.counter)

    def contribute(self, sender: PeerId, message: Contribution, data: bytes) -> None:
        """Add one chunk of a member's outer gradient. Raises WireError if it is off the plan."""
        if not self._has_roster:
            self._early.add(sender, message, data)
        elif self._reducer is not None:
            self._reducer.collect(sender, message, data)

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        if not self._has_roster:
            self._early.overrun.add(peer_id)
        elif self._reducer is not None:
            self._reducer.note_lost(peer_id)

    def give_up_stalled(self) -> None:
        """Exclude senders that make no progress; called a few times a second."""
        if self._reducer is not None:
            self._reducer.give_up_stalled()

    async def run(self, window_s: float) -> None:
        """Take part until cancelled, or until an error, which is reported to the consensus and not raised.

        Args:
            window_s: seconds for taking our snapshot.
        """
        with self.scope, self._taker.in_use():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._prepare, window_s)
                    sending = trio.CancelScope()
                    async for order in self._orders:
                        if self.scope.cancel_called:  # the attempt ended when the order was here already
                            break
                        match order:
                            case Roster() if not self._has_roster:
                                self._begin(order)
                                if self._sender is not None:
                                    nursery.start_soon(self._send, self._sender, sending)
                                if self._reducer is not None:
                                    nursery.start_soon(self._reducer.run)
                            case Reduce() if self._reducer is not None:
                                # Sending goes on while we reduce for others.
                                nursery.start_soon(self._reducer.reduce, order)
                            case Fetch(record=record) if not self._fetching:
                                sending.cancel()
                                if self._reducer is not None:
                                    self._reducer.end()
                                self._fetching = True
                                nursery.start_soon(self._hold, record)
            except* (RoundFailedError, PeerLostError, WireError) as errors:
                self._fail(str(innermost(errors)))
            except* Exception as errors:
                self._context.errors.note(f"attempt {self.attempt.counter} ended for us", errors)
                self._fail(f"unexpected error: {innermost(errors)!r}")

    def _fail(self, reason: str) -> None:
        logger.debug("round %d, attempt %d: %s", self._head.round + 1, self.attempt.counter, reason)
        self._events.apply(MemberFailed(self.attempt, reason))

    async def _prepare(self, window_s: float) -> None:
        context = self._context
        if context.codec.size_bytes(context.grid.num_blocks) >= BULK_FROM_BYTES:
            # Before the roster names the reducers: a handshake takes two round trips. The other side does the same.
            links = (context.links.get(peer) for peer in context.host.lineage_peers() if context.peer_id < peer)
            context.links.bulk.open_soon(link for link in links if link is not None)
        own = await self._taker.take(window_s)
        join = self._join(own)
        # A Join that others would refuse costs us this attempt; sent, it would be a strike for us at every leader.
        check_join(join)
        self._events.apply(Prepared(self.attempt, join))

    def _begin(self, roster: Roster) -> None:
        """Begin what the roster plans for us; who has no place on it waits for the record."""
        context, self._has_roster = self._context, True
        if context.peer_id not in roster.members:
            self._early = EarlyChunks(context.codec, context.grid)
            return
        context.pushed.begin_attempt(roster)
        for number, part in enumerate(roster.parts):
            if part.reducer == context.peer_id:
                self._reducer = Reducer(context, roster, number, self._events)
        self._sender = Sender(context, roster, self._taker, self._reducer)
        if self._reducer is not None:
            self._reducer.take(self._early)

    async def _send(self, sender: Sender, scope: trio.CancelScope) -> None:
        with scope:
            await sender.send()

    async def _hold(self, record: Record) -> None:
        check_pace(record, self._context.run, self._head, self._context.exchange.run_step)
        # A leader without a roster proposes the record of an attempt before, which may name anybody.
        leads = self.attempt.leader == self._context.peer_id and self._has_roster
        context = self._context
        # Our READY for this record may have decided it, so it must not depend on whom we see now.
        is_accepted = context.parts.accepted == record
        if not (self._taker.sits_out or leads or is_accepted):
            most, size = context.run.max_contributors, context.swarm_size()
            seen = expected(record, context.liveness.present(), most, size)
            # No leader can name strangers that are linked but never take part.
            own, recent = context.liveness.own, context.recent
            try:
                check_company(record, {voter for voter in seen if voter == own or recent.admits(voter[0])})
            except RoundFailedError:
                # A peer that is READY with a reported record can take part in no other, so one of us has to give in.
                if self._has_roster or self._events.refused_for_s(record.sha256) < GIVE_IN_S:
                    raise
                logger.info("round %d: its record names few of us, but no other could be decided", record.round)
        self._check_commitments(record)
        try:
            norms = await self._fetcher.fetch(record)
        except PeerLostError:
            self._avoid(self._context.parts.holders_missed(record))
            raise
        except UnusableMeanError as error:
            self._avoid(_holders_at(record, error.start))
            raise
        await self._check_mean(record, norms)
        self._held = True
        self._events.apply(Held(self.attempt, record.sha256))

    def _check_commitments(self, record: Record) -> None:
        """Raises RoundFailedError if the record names other contributions than we sent or averaged."""
        name = name_of(record, self._context.liveness.own, self._context.averaging)
        if name is not None and not self._taker.gave(name):
            raise RoundFailedError("the record names another outer gradient of ours than we sent")
        if self._reducer is not None:
            self._reducer.check_record(record)

    async def _check_mean(self, record: Record, norms: SpanNorms) -> None:
        """Raises RoundFailedError if the mean is far larger than those of the last rounds."""
        context, own = self._context, self._taker.own
        if context.run.round_guard == "off":
            return
        steps = own.snapshot.steps if own is not None else context.exchange.steps
        leader = (self.attempt.leader, self.attempt.incarnation)
        reason = context.mean_guard.refusal(norms, self._head, leader, steps, has_snapshot=own is not None)
        if reason:
            logger.warning("round %d, attempt %d is refused: %s", record.round, self.attempt.counter, reason)
            if own is not None and context.averaging.reduces:
                await self._avoid_largest(record, norms, own)
            raise RoundFailedError(reason)

    def _avoid(self, holders: Collection[PeerId]) -> None:
        """Avoid the reducers of parts that are missing or wrong.

        Nobody without a roster: who reported the record may have made up its holders. Nobody where the parts are outer
        gradients: who holds one may reduce nothing.
        """
        if self._sender is not None and self._context.averaging.reduces:
            for holder in set(holders) - {self._context.peer_id}:
                self._context.avoided.note(holder, trio.current_time(), SILENT_REDUCER_S)

    async def _avoid_largest(self, record: Record, norms: SpanNorms, own: OwnContribution) -> None:
        """Avoid the reducer whose part of the mean exceeds our own outer gradient the most."""
        codec, num_stepped = self._context.codec, self._context.state.num_stepped
        grid = self._context.grid

        def excess() -> list[float]:
            return [norm / max(own.squared_norm(codec, grid.bounds(*span), num_stepped), 1e-30) for span, norm in norms]

        excesses = await self._context.compute(excess)
        (start, _), _ = norms[excesses.index(max(excesses))]
        self._avoid(_holders_at(record, start))

    def _join(self, own: OwnContribution | None) -> Join:
        context, links = self._context, self._context.links
        return Join(
            lineage=self._head.lineage,
            round=self._head.round + 1,
            attempt=self.attempt,
            incarnation=context.incarnation,
            state_hash=self._head.state_hash,
            has_snapshot=own is not None,
            tokens=own.snapshot.tokens if own else 0,
            shard_tokens=context.exchange.shard_tokens,
            run_step=own.snapshot.run_step if own else context.exchange.run_step,
            speed=context.exchange.speed,
            rate=max((link.rate_bytes_s for link in links.live.values()), default=0.0),
            linked=tuple(links.live),
            at_length=own.snapshot.at_length if own else False,
            view=self._view(),
            ready_attempt=None,
            ready=None,
        )

    def _view(self) -> View | None:
        """Whom we see: voters that contributed of late and, while there is room, peers that may be drawn.

        None if we do not vote.
        """
        context, voters = self._context, self._head.voters
        if context.liveness.own not in voters:
            return None
        present = context.liveness.present()
        likely: Collection[PeerId] = ()
        if len(voters) < MAX_VOTERS:
            likely = drawn(self._head.state_hash, (peer for peer, _ in present), context.run.max_contributors)
        return context.prover.view(
            self._head,
            seen_of(v for v in present if (context.recent.admits(v[0]) if v in voters else v[0] in likely)),
        )


def _holders_at(record: Record, block: int) -> set[PeerId]:
    """The holders of a record's parts that have this block."""
    return {part.holder for part in record.parts if part.start <= block < part.stop}
