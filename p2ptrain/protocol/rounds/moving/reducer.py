"""The averaging of one part: collect its chunks, report who is complete, average the contributors', push the mean.

The mean of the contributors that the roster expects is made chunk by chunk while other chunks are on their way. If the
leader names others, it is made anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import trio

from p2ptrain.algorithms.codec import Encoded
from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import AttemptEvents, RoundContext
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blob, Chunks
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.deciding.timeouts import REPORT_S
from p2ptrain.protocol.rounds.moving.collection import Collection, EarlyChunks
from p2ptrain.protocol.rounds.moving.pushed_means import BoundedBuffer, MeanPush
from p2ptrain.protocol.wire.messages import Arrived, Contribution, Contributor, Record, Reduce, Reduced, Roster
from p2ptrain.protocol.wire.transport import PeerId

# Chunks that a worker thread averages at a time; it also encodes and measures (guess).
CHUNKS_AVERAGED = 8

# The encoded chunks of all contributors with their weights, and the chunk's number of blocks.
Received = tuple[list[tuple[Encoded, float]], int]


class ExpectedMean:
    """The chunks of the expected contributors' mean that are not made yet.

    Args:
        bounds: the chunks of the part.
        contributors: those that the roster expects, without Merkle roots.
        averaging: merges the chunks.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], contributors: Sequence[Contributor], averaging: Averaging
    ) -> None:
        self.contributors = tuple(contributors)
        self._averaging = averaging
        self._left = deque(bounds)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks were taken."""
        return not self._left

    def take(self, chunks: Chunks, threads: int) -> list[Received]:
        """The next chunks for so many worker threads, in the part's order, that all contributors have sent.

        Empty while one is awaited.
        """
        taken: list[Received] = []
        while self._left and len(taken) < CHUNKS_AVERAGED * threads:
            start, stop = self._left[0]
            senders = [c for c in self.contributors if start in chunks.get(c.peer_id, ())]
            if len(senders) < len(self.contributors):
                break
            taken.append(([(chunks[c.peer_id][start], c.weight) for c in senders], stop - start))
            self._left.popleft()
        return taken

    def average(self, received: Received) -> bytes:
        """The encoded mean of a chunk. Changes nothing; for worker threads. Raises WireError if it is not finite."""
        return self._averaging.merge(*received)


class Reducer:
    """Averages the roster's `number`th part. Run `run` in a task."""

    def __init__(self, context: RoundContext, roster: Roster, number: int, events: AttemptEvents) -> None:
        """The roster has been checked."""
        part = self._part = roster.parts[number]
        self._context = context
        self._roster = roster
        self._number = number
        self._events = events
        self._attempt = roster.lineage, roster.round, roster.attempt
        self._bounds = context.grid.bounds(part.start, part.stop)
        self._collection = Collection(
            part,
            part.senders or roster.members,
            context.grid,
            context.codec,
            context.timeouts,
            trio.current_time(),
            num_stepped=context.state.num_stepped,
            audited=context.audited,
        )
        self._chunk_arrived, self._measured = trio.Event(), trio.Event()
        self._expecting = trio.CancelScope()
        self._push = MeanPush(roster, BoundedBuffer(context.pushed.mean_bytes(part.stop - part.start)))
        self._ordered: Reduce | None = None
        # Those in the mean that we have made, or make by the leader's order.
        self._averaged: tuple[Contributor, ...] = ()
        self._has_reported = False

    def take(self, early: EarlyChunks) -> None:
        """Take the chunks that came before the roster."""
        for sender, message, data in early.take():
            self.collect(sender, message, data, checked=True)
        for sender in early.overrun:
            self.note_lost(sender)

    def collect(self, sender: PeerId, message: Contribution, data: Encoded, *, checked: bool = False) -> None:
        """Add one chunk of a member's outer gradient. Raises WireError if it is off the plan or does not decode."""
        if not self._part.start <= message.start < self._part.stop:
            return
        if self._collection.add(sender, message, data, trio.current_time(), checked=checked):
            self._chunk_arrived.set()
            self._chunk_arrived = trio.Event()

    def check_record(self, record: Record) -> None:
        """Raises RoundFailedError if the record names other contributors than we have averaged."""
        if self._averaged and record.contributors != self._averaged:
            raise RoundFailedError("the record names other contributors than were averaged")

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        if self._collection.fail(peer_id):
            self._report()

    def give_up_stalled(self) -> None:
        """Exclude senders that make no progress; called a few times a second."""
        rtt_s = {peer_id: link.flow.rtt_s for peer_id, link in self._context.links.live.items()}
        if self._collection.give_up_stalled(trio.current_time(), rtt_s):
            self._report()

    def end(self) -> None:
        """The outcome is proposed: drop the chunks that we averaged, which are kept in case others are named."""
        if self._has_reported:
            self._collection.clear()

    async def run(self) -> None:
        """Measure, average and report until cancelled. Raises RoundFailedError or WireError."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_forever)
            nursery.start_soon(self._measure_forever)
            if self._roster.expected and self._context.averaging.reduces:
                nursery.start_soon(self._average_expected)

    def _report(self) -> None:
        norms, roots = self._collection.norms, self._collection.roots
        complete, failed = tuple(sorted(norms)), tuple(sorted(self._collection.failed))
        arrived = Arrived(
            *self._attempt,
            self._number,
            complete,
            failed,
            tuple(norms[member] for member in complete),
            tuple(roots[member] for member in complete),
        )
        self._events.tell(self._roster.attempt.leader, arrived)

    async def _report_forever(self) -> None:
        """Report to the leader at intervals, also without news, to show that we are alive."""
        while True:
            await trio.sleep(REPORT_S)
            self._report()

    async def _measure_forever(self) -> None:
        """Measure chunks as they arrive, check what their senders committed to, and report complete members."""
        collection, compute = self._collection, self._context.compute
        while True:
            arrived = self._chunk_arrived
            while chunks := collection.take_unmeasured(compute.threads):
                known = len(collection.norms)
                refused = collection.note(await in_parallel(compute, collection.measure, chunks))
                self._measured.set()
                self._measured = trio.Event()
                if refused or len(collection.norms) > known:
                    self._report()
                for sender, error in refused.items():
                    if (link := self._context.links.get(sender)) is not None:
                        with self._context.links.containing(link, "checking its outer gradient"):
                            raise error
            await arrived.wait()

    async def _average_expected(self) -> None:
        """Average the chunks of the expected contributors as they arrive, and push the mean as it grows."""
        context, collection, push = self._context, self._collection, self._push
        expected = ExpectedMean(self._bounds, self._roster.expected, context.averaging)
        context.pushed.push(push)
        try:
            with self._expecting:
                while not expected.is_complete:
                    arrived = self._chunk_arrived
                    if received := expected.take(collection.chunks, context.compute.threads):
                        push.extend(b"".join(await in_parallel(context.compute, expected.average, received)))
                    else:
                        await arrived.wait()
                if self._ordered is None:
                    push.end()
                    await self._all_measured(expected.contributors)
                # The worker threads' results may come although the order has cancelled us.
                if self._ordered is None:
                    contributors = self._averaged = tuple(
                        Contributor(c.peer_id, c.incarnation, c.weight, collection.roots[c.peer_id])
                        for c in expected.contributors
                    )
                    gram = await context.compute(collection.gram(contributors))
                    await self._serve(contributors, [push.data], gram, as_expected=True)
        except WireError:
            push.give_up()
            # Whoever sent such values is refused when they are measured, and the leader names the others.
            await self._all_measured(expected.contributors)
            if self._ordered is None:
                raise
        finally:
            if not push.has_ended:
                push.give_up()

    async def _all_measured(self, contributors: Sequence[Contributor]) -> None:
        """Return once the chunks of all these are here, measured and not refused."""
        while any(c.peer_id not in self._collection.norms for c in contributors):
            await self._measured.wait()

    async def reduce(self, order: Reduce) -> None:
        """Combine the chunks of the contributors that the leader names, and serve the result."""
        if self._ordered not in (None, order):
            raise RoundFailedError("told to average two sets of contributors")
        if self._ordered is not None:
            return
        self._ordered = order
        context, collection = self._context, self._collection
        named = {c.peer_id for c in order.contributors}
        contributors = tuple(c for c in order.contributors if c.peer_id in collection.chunks)
        if len(named) < len(order.contributors) or not named <= set(self._roster.members):
            raise RoundFailedError("told to average contributors that are not distinct members")
        if not contributors or not {c.peer_id for c in contributors} <= collection.complete & collection.norms.keys():
            raise RoundFailedError("told to average a member that is not complete here")
        if any(c.root != collection.roots[c.peer_id] for c in contributors):
            raise RoundFailedError("told to average a member by another commitment than it gave")
        self._expecting.cancel()
        self._push.give_up()
        self._averaged = order.contributors
        chunks, gram_of = collection.chunks, collection.gram(contributors)

        def work() -> tuple[Sequence[Blob], tuple[float, ...]]:
            return context.averaging.reduce(self._bounds, chunks, contributors), gram_of()

        blobs, gram = await context.compute(work)
        collection.clear()
        await self._serve(order.contributors, blobs, gram, as_expected=False)

    async def _serve(
        self, contributors: Sequence[Contributor], blobs: Sequence[Blob], gram: tuple[float, ...], *, as_expected: bool
    ) -> None:
        """Keep what we averaged for others, push it unless that is done, and report it to the leader."""
        context, bounds = self._context, (self._part.start, self._part.stop)
        digests = [await context.compute(part_digest, blob, contributors, bounds) for blob in blobs]
        for digest, blob in zip(digests, blobs, strict=True):
            context.parts.add(digest, blob)
            if context.averaging.reduces and not as_expected:
                context.pushed.push(MeanPush(self._roster, BoundedBuffer.of(blob), digest))
        reduced = Reduced(*self._attempt, self._number, tuple(digests), gram, as_expected)
        self._events.tell(self._roster.attempt.leader, reduced)
        self._has_reported = True
