"""The averaging of one attempt at one member: send our chunks, collect those of other members, reduce our part.

The leader's Roster contains the plan of the averaging strategy.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError
from p2ptrain.protocol.links.link import Traffic
from p2ptrain.protocol.rounds.averaging.strategy import Blob
from p2ptrain.protocol.rounds.collection import Collection, EarlyChunks
from p2ptrain.protocol.rounds.context import RoundContext, Tell
from p2ptrain.protocol.rounds.contribution import CHUNKS_PER_VISIT
from p2ptrain.protocol.rounds.grid import chunk_bounds
from p2ptrain.protocol.rounds.policy import parts_of
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.timeouts import REPORT_S
from p2ptrain.protocol.wire.messages import Arrived, Contribution, Reduce, Reduced, Roster
from p2ptrain.protocol.wire.transport import PeerId


class Transfer:
    """Carries out one roster. Async methods raise RoundFailedError, PeerLostError or WireError.

    Attributes:
        num_chunks, num_sent: chunks to send in all, and those sent.
        reducing: whether our part is being reduced now.
    """

    def __init__(
        self, context: RoundContext, roster: Roster, taker: SnapshotTaker, early: EarlyChunks, tell: Tell
    ) -> None:
        """Takes the early chunks. The roster has been checked."""
        self.reducing = False
        self._context = context
        self._roster = roster
        self._attempt = roster.lineage, roster.round, roster.attempt
        self._taker = taker
        self._tell = tell
        self._encoded = trio.Event()
        self._to_send = sorted(parts_of(roster.members, roster.parts)[context.peer_id])
        self._parts_left = set(range(len(roster.parts)))
        self.num_chunks = sum(len(self._chunks_of(part)) for part in self._to_send)
        self.num_sent = 0
        self._reduced: Reduce | None = None
        self._collection: Collection | None = None
        for number, part in enumerate(roster.parts):
            if part.reducer == context.peer_id:
                senders, now = part.senders or roster.members, trio.current_time()
                self._collection = Collection(number, part, senders, context.codec, context.timeouts, now)
        for sender, start, stop, data in early.take():
            self.collect(sender, start, stop, data, checked=True)
        for sender in early.overrun:
            self.note_lost(sender)

    def collect(self, sender: PeerId, start: int, stop: int, data: bytes, *, checked: bool = False) -> None:
        """Add one chunk of a member's outer gradient. Raises WireError if it is off the plan or does not decode."""
        collection = self._collection
        if collection is None or not collection.part.start <= start < collection.part.stop:
            return
        if collection.add(sender, start, stop, data, trio.current_time(), checked=checked):
            self._report(collection)

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
        complete, failed = tuple(sorted(collection.complete)), tuple(sorted(collection.failed))
        self._tell(self._roster.attempt.leader, Arrived(*self._attempt, collection.number, complete, failed))

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
                nursery.start_soon(self._send_part, number, own.chunks)
            for visit in self._visits():
                if any(start not in own.chunks for start, _ in visit):
                    await self._taker.encode(visit)
                self._encoded.set()
                self._encoded = trio.Event()

    def _chunks_of(self, number: int) -> list[tuple[int, int]]:
        part = self._roster.parts[number]
        return chunk_bounds(part.start, part.stop)

    def _visits(self) -> Iterator[list[tuple[int, int]]]:
        """Chunks to encode at a time, round-robin over the parts, so that no reducer waits."""
        lanes = [deque(chunks) for chunks in dict.fromkeys(tuple(self._chunks_of(number)) for number in self._to_send)]
        while lanes:
            for lane in lanes:
                yield [lane.popleft() for _ in range(min(CHUNKS_PER_VISIT, len(lane)))]
            lanes = [lane for lane in lanes if lane]

    async def _send_part(self, number: int, encoded: dict[int, bytes]) -> None:
        context, reducer = self._context, self._roster.parts[number].reducer
        link = context.links.get(reducer)
        try:
            if link is None and reducer != context.peer_id:
                raise PeerLostError(f"reducer {reducer} is not linked")
            for start, stop in self._chunks_of(number):
                while start not in encoded:
                    await self._encoded.wait()
                if link is None:
                    self.collect(context.peer_id, start, stop, encoded[start], checked=True)
                else:
                    message = Contribution(*self._attempt, start, stop)
                    await link.send_bulk(message, encoded[start], Traffic.ROUND, compress=True)
                self.num_sent += 1
        except PeerLostError:
            self._parts_left.remove(number)
            if not context.averaging.is_complete(self._roster.parts, self._parts_left):
                raise

    async def reduce(self, order: Reduce) -> None:
        """Combine the chunks of the contributors that the leader names, and serve the result."""
        if self._reduced not in (None, order):
            raise RoundFailedError("told to average two sets of contributors")
        collection = self._collection
        if self._reduced is not None or collection is None:
            return
        self._reduced = order
        context = self._context
        named = {c.peer_id for c in order.contributors}
        contributors = tuple(c for c in order.contributors if c.peer_id in collection.chunks)
        if len(named) < len(order.contributors) or not named <= set(self._roster.members):
            raise RoundFailedError("told to average contributors that are not distinct members")
        if not contributors or not {c.peer_id for c in contributors} <= collection.complete:
            raise RoundFailedError("told to average a member that is not complete here")

        def work() -> tuple[list[tuple[str, Blob]], tuple[float, ...]]:
            gram = collection.gram(contributors, context.state.num_stepped)
            blobs = context.averaging.reduce(collection.part, collection.chunks, contributors)
            return [(hashlib.sha256(blob).hexdigest(), blob) for blob in blobs], gram

        self.reducing = True
        blobs, gram = await context.compute(work)
        self.reducing = False
        collection.clear()
        for sha256, blob in blobs:
            context.parts.add(sha256, blob)
        sha256s = tuple(sha256 for sha256, _ in blobs)
        self._tell(self._roster.attempt.leader, Reduced(*self._attempt, collection.number, sha256s, gram))
