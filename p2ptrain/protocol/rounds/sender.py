"""Sending our outer gradient to the reducers of one attempt, as the leader's roster plans it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.contribution import CHUNKS_PER_VISIT, OwnContribution
from p2ptrain.protocol.rounds.policy import parts_of
from p2ptrain.protocol.rounds.reducer import Reducer
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.wire.messages import Contribution, Roster


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
                compute, bounds = self._context.compute, self._context.grid.bounds(0, self._context.state.num_blocks)
                await compute(own.seal, await in_parallel(compute, own.leaf, bounds))
            elif not self._context.averaging.reduces:
                await self._context.compute(own.make_digest)
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
        except PeerLostError:
            self._parts_left.remove(number)
            if not context.averaging.is_complete(self._roster.parts, self._parts_left):
                raise
