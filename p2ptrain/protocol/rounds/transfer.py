"""The averaging of one attempt at one member: send our chunks, collect those of other members, reduce our part.

The leader's Roster contains the plan of the averaging strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import trio

from p2ptrain.algorithms.codec import Encoded
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.averaging.strategy import Blob
from p2ptrain.protocol.rounds.bounded_buffer import BoundedBuffer
from p2ptrain.protocol.rounds.collection import Collection, EarlyChunks
from p2ptrain.protocol.rounds.context import RoundContext, Tell
from p2ptrain.protocol.rounds.contribution import CHUNKS_PER_VISIT, OwnContribution
from p2ptrain.protocol.rounds.expected_mean import ExpectedMean
from p2ptrain.protocol.rounds.inspection import Inspection
from p2ptrain.protocol.rounds.part_store import MeanPush, blob_sha256
from p2ptrain.protocol.rounds.policy import parts_of
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.timeouts import REPORT_S
from p2ptrain.protocol.wire.messages import Arrived, Contribution, Contributor, Record, Reduce, Reduced, Roster
from p2ptrain.protocol.wire.transport import PeerId


class Transfer:
    """Carries out one roster. Async methods raise RoundFailedError, PeerLostError or WireError.

    Attributes:
        num_chunks, num_sent: chunks to send in all, and those sent.
    """

    def __init__(
        self, context: RoundContext, roster: Roster, taker: SnapshotTaker, early: EarlyChunks, tell: Tell
    ) -> None:
        """Takes the early chunks. The roster has been checked."""
        self._context = context
        self._roster = roster
        self._attempt = roster.lineage, roster.round, roster.attempt
        self._taker = taker
        self._tell = tell
        self._encoded, self._sealed = trio.Event(), trio.Event()
        self._to_send = sorted(parts_of(roster.members, roster.parts)[context.peer_id])
        self._parts_left = set(range(len(roster.parts)))
        self.num_chunks = sum(len(self._chunks_of(part)) for part in self._to_send)
        self.num_sent = 0
        self._ordered: Reduce | None = None
        # Those in the mean that we have made, or make by the leader's order.
        self._averaged: tuple[Contributor, ...] = ()
        self._expected: ExpectedMean | None = None
        self._expected_push = MeanPush(roster, BoundedBuffer(0))
        self._expecting = trio.CancelScope()
        self._has_reported = False
        self._collection: Collection | None = None
        self._inspection: Inspection | None = None
        self._chunk_arrived, self._inspected = trio.Event(), trio.Event()
        context.parts.begin_attempt(roster)
        for number, part in enumerate(roster.parts):
            if part.reducer == context.peer_id:
                senders, now = part.senders or roster.members, trio.current_time()
                self._collection = Collection(number, part, senders, context.grid, context.codec, context.timeouts, now)
                self._inspection = Inspection(
                    part, context.codec, context.grid, compared=context.state.num_stepped, sealed=context.audited
                )  # fmt: skip
                if roster.expected and context.averaging.reduces:
                    self._expected = ExpectedMean(self._chunks_of(number), roster.expected, context.averaging.merge)
                    self._expected_push = MeanPush(
                        roster, BoundedBuffer(context.parts.mean_bytes(part.stop - part.start))
                    )
        for sender, message, data in early.take():
            self.collect(sender, message, data, checked=True)
        for sender in early.overrun:
            self.note_lost(sender)

    def collect(self, sender: PeerId, message: Contribution, data: Encoded, *, checked: bool = False) -> None:
        """Add one chunk of a member's outer gradient. Raises WireError if it is off the plan or does not decode."""
        collection, inspection, start = self._collection, self._inspection, message.start
        if collection is None or inspection is None or not collection.part.start <= start < collection.part.stop:
            return
        held = collection.chunks.get(sender, {})
        count = len(held)
        collection.add(sender, start, message.stop, data, trio.current_time(), checked=checked)
        if len(held) > count:
            inspection.add(sender, start, data, message.root, message.proof)
            self._chunk_arrived.set()
            self._chunk_arrived = trio.Event()

    def check_record(self, record: Record) -> None:
        """Raises RoundFailedError if the record names other contributors than this reducer has averaged."""
        if self._averaged and record.contributors != self._averaged:
            raise RoundFailedError("the record names other contributors than were averaged")

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        if self._collection is not None and self._collection.fail(peer_id):
            self._report(self._collection)

    def give_up_stalled(self) -> None:
        """Exclude senders that make no progress; called a few times a second."""
        rtt_s = {peer_id: link.flow.rtt_s for peer_id, link in self._context.links.live.items()}
        if self._collection is not None and self._collection.give_up_stalled(trio.current_time(), rtt_s):
            self._report(self._collection)

    def _report(self, collection: Collection) -> None:
        assert self._inspection is not None
        norms, roots = self._inspection.norms, self._inspection.roots
        complete, failed = tuple(sorted(norms)), tuple(sorted(collection.failed))
        arrived = Arrived(
            *self._attempt, collection.number, complete, failed,
            tuple(norms[member] for member in complete), tuple(roots[member] for member in complete),
        )  # fmt: skip
        self._tell(self._roster.attempt.leader, arrived)

    async def inspect_forever(self) -> None:
        """Measure chunks as they arrive, check what their senders committed to, and report complete members."""
        collection, inspection = self._collection, self._inspection
        if collection is None or inspection is None:
            return
        while True:
            arrived = self._chunk_arrived
            compute = self._context.compute
            while chunks := inspection.take(collection.complete, compute.threads):
                known = len(inspection.norms)
                refused = inspection.note(await in_parallel(compute, inspection.measure, chunks))
                self._inspected.set()
                self._inspected = trio.Event()
                for sender in refused:
                    collection.reject(sender)
                if refused or len(inspection.norms) > known:
                    self._report(collection)
                for sender, error in refused.items():
                    if (link := self._context.links.get(sender)) is not None:
                        with self._context.links.containing(link, "checking its outer gradient"):
                            raise error
            await arrived.wait()

    async def report_forever(self) -> None:
        """Report our part to the leader at intervals, also without news, to show that we are alive."""
        while self._collection is not None:
            await trio.sleep(REPORT_S)
            self._report(self._collection)

    async def send(self) -> None:
        """Encode our outer gradient and stream each of our parts to its reducer, to all reducers at once."""
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
                compute, bounds = self._context.compute, self._context.grid.bounds(0, self._context.state.num_blocks)
                await compute(own.seal, await in_parallel(compute, own.leaf, bounds))
            elif not self._context.averaging.reduces:
                await self._context.compute(own.digest)
            self._sealed.set()

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
        part = self._roster.parts[number]
        link = context.links.get(reducer)
        try:
            if link is None and reducer != context.peer_id:
                raise PeerLostError(f"reducer {reducer} is not linked")
            for start, stop in self._chunks_of(number):
                while start not in encoded:
                    await self._encoded.wait()
                message = Contribution(*self._attempt, start, stop, b"", ())
                if stop == part.stop:
                    await self._sealed.wait()
                    if own.tree is not None:
                        proof = own.tree.proof(*context.grid.numbers(part.start, part.stop))
                        message = Contribution(*self._attempt, start, stop, own.tree.root, proof)
                if link is None:
                    self.collect(context.peer_id, message, encoded[start], checked=True)
                else:
                    # A copy: it may wait in the queue when the outer step overwrites the chunk.
                    await link.send_bulk(message, bytes(encoded[start]), Traffic.ROUND, compress=True)
                self.num_sent += 1
        except PeerLostError:
            self._parts_left.remove(number)
            if not context.averaging.is_complete(self._roster.parts, self._parts_left):
                raise

    async def average_expected(self) -> None:
        """Average the chunks of the expected contributors as they arrive, and push the mean as it grows."""
        expected, collection, inspection = self._expected, self._collection, self._inspection
        if expected is None or collection is None or inspection is None:
            return
        context, mean = self._context, self._expected_push
        context.parts.push(mean)
        try:
            with self._expecting:
                while not expected.is_complete:
                    arrived = self._chunk_arrived
                    if received := expected.take(collection.chunks, context.compute.threads):
                        mean.extend(b"".join(await in_parallel(context.compute, expected.average, received)))
                    else:
                        await arrived.wait()
                if self._ordered is None:
                    mean.end()
                    await self._measured(expected.contributors)
                # The worker threads' results may come although the order has cancelled us.
                if self._ordered is None:
                    roots = inspection.roots
                    contributors = self._averaged = tuple(
                        Contributor(c.peer_id, c.incarnation, c.weight, roots[c.peer_id]) for c in expected.contributors
                    )
                    gram = await context.compute(collection.gram(contributors, context.state.num_stepped))
                    await self._serve(contributors, [mean.data], gram, as_expected=True)
        except WireError:
            mean.give_up()
            # Whoever sent such values is refused when they are measured, and the leader names the others.
            await self._measured(expected.contributors)
            if self._ordered is None:
                raise
        finally:
            if not mean.has_ended:
                mean.give_up()

    async def _measured(self, contributors: Sequence[Contributor]) -> None:
        """Return once the chunks of all these are here, measured and not refused."""
        assert self._inspection is not None
        while any(c.peer_id not in self._inspection.norms for c in contributors):
            await self._inspected.wait()

    async def reduce(self, order: Reduce) -> None:
        """Combine the chunks of the contributors that the leader names, and serve the result."""
        if self._ordered not in (None, order):
            raise RoundFailedError("told to average two sets of contributors")
        collection, inspection = self._collection, self._inspection
        if self._ordered is not None or collection is None or inspection is None:
            return
        self._ordered = order
        context = self._context
        named = {c.peer_id for c in order.contributors}
        contributors = tuple(c for c in order.contributors if c.peer_id in collection.chunks)
        if len(named) < len(order.contributors) or not named <= set(self._roster.members):
            raise RoundFailedError("told to average contributors that are not distinct members")
        if not contributors or not {c.peer_id for c in contributors} <= collection.complete & inspection.norms.keys():
            raise RoundFailedError("told to average a member that is not complete here")
        if any(c.root != inspection.roots[c.peer_id] for c in contributors):
            raise RoundFailedError("told to average a member by another commitment than it gave")
        self._expecting.cancel()
        self._expected_push.give_up()
        self._averaged = order.contributors

        chunks, gram_of = collection.chunks, collection.gram(contributors, context.state.num_stepped)

        def work() -> tuple[Sequence[Blob], tuple[float, ...]]:
            return context.averaging.reduce(self._chunks_of(collection.number), chunks, contributors), gram_of()

        blobs, gram = await context.compute(work)
        collection.clear()
        await self._serve(order.contributors, blobs, gram, as_expected=False)

    async def _serve(
        self, contributors: Sequence[Contributor], blobs: Sequence[Blob], gram: tuple[float, ...], *, as_expected: bool
    ) -> None:
        """Keep what we averaged for others, push it unless that is done, and report it to the leader."""
        context, collection = self._context, self._collection
        assert collection is not None
        bounds = collection.part.start, collection.part.stop
        sha256s = [await context.compute(blob_sha256, blob, contributors, bounds) for blob in blobs]
        for sha256, blob in zip(sha256s, blobs, strict=True):
            context.parts.add(sha256, blob)
            if context.averaging.reduces and not as_expected:
                context.parts.push(MeanPush(self._roster, BoundedBuffer.of(blob), sha256))
        reduced = Reduced(*self._attempt, collection.number, tuple(sha256s), gram, as_expected)
        self._tell(self._roster.attempt.leader, reduced)
        self._has_reported = True

    def end(self) -> None:
        """The outcome is proposed: drop the chunks that we averaged, which are kept in case others are named."""
        if self._has_reported and self._collection is not None:
            self._collection.clear()
