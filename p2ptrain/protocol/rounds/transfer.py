"""The averaging of one attempt at one member: send our chunks, collect those of other members, reduce our parts.

The leader's Roster contains the plan of the averaging strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError
from p2ptrain.protocol.links.link import Traffic
from p2ptrain.protocol.rounds.collection import Collection, EarlyChunks
from p2ptrain.protocol.rounds.context import RoundContext, Tell
from p2ptrain.protocol.rounds.contribution import CHUNKS_PER_VISIT
from p2ptrain.protocol.rounds.grid import chunk_bounds
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.timeouts import REPORT_S
from p2ptrain.protocol.wire.messages import Arrived, Contribution, Contributor, Reduce, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId


class Transfer:
    """Carries out one roster. Async methods raise RoundFailedError, PeerLostError or WireError."""

    def __init__(
        self, context: RoundContext, roster: Roster, taker: SnapshotTaker, early: EarlyChunks, tell: Tell
    ) -> None:
        """Takes the early chunks. The plan has been checked."""
        self.reducing = False
        self._context = context
        self._roster = roster
        self._taker = taker
        self._tell = tell
        self._encoded = trio.Event()
        self._parts = [part for part in roster.parts if context.peer_id in (part.senders or roster.members)]
        self._to_send = self._unsent = sum(len(chunk_bounds(part.start, part.stop)) for part in self._parts)
        self._reduced: Reduce | None = None
        members, now = roster.members, trio.current_time()
        self._collections = [
            Collection(i, part.start, part.stop, part.senders or members, context.codec, context.timeouts, now)
            for i, part in enumerate(roster.parts)
            if part.reducer == context.peer_id
        ]
        for sender, start, stop, data in early.take():
            self.collect(sender, start, stop, data, checked=True)
        for sender in early.overrun:
            self.note_lost(sender)

    @property
    def sent(self) -> tuple[int, int]:
        """Chunks sent, and chunks to send in all."""
        return self._to_send - self._unsent, self._to_send

    def collect(self, sender: PeerId, start: int, stop: int, data: bytes, *, checked: bool = False) -> None:
        """Add one chunk of a member's outer gradient. Raises WireError if it is off the plan or does not decode."""
        for collection in self._collections:
            here = collection.start <= start < collection.stop
            if here and collection.add(sender, start, stop, data, trio.current_time(), checked=checked):
                self._report(collection)

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        for collection in self._collections:
            if collection.fail(peer_id):
                self._report(collection)

    def give_up_stalled(self) -> None:
        """Exclude senders that make no progress; called a few times a second."""
        rtt_s = {peer_id: link.rtt_s for peer_id, link in self._context.links.live.items()}
        for collection in self._collections:
            if collection.give_up_stalled(trio.current_time(), rtt_s):
                self._report(collection)

    def _report(self, collection: Collection) -> None:
        roster = self._roster
        complete, failed = tuple(sorted(collection.complete)), tuple(sorted(collection.failed))
        self._tell(
            roster.attempt.leader,
            Arrived(roster.lineage, roster.round, roster.attempt, collection.part, complete, failed),
        )

    async def report_forever(self) -> None:
        """Report our parts to the leader at intervals, also without news, to show that we are alive."""
        while self._collections:
            await trio.sleep(REPORT_S)
            for collection in self._collections:
                self._report(collection)

    async def send(self) -> None:
        """Encode our outer gradient and stream each of our parts to its reducer, to all reducers at once."""
        own = self._taker.own
        if own is None:
            raise RoundFailedError("on the roster without a snapshot")
        async with trio.open_nursery() as nursery:
            for part in self._parts:
                nursery.start_soon(self._send_part, part, own.chunks)
            for visit in self._visits():
                if any(start not in own.chunks for start, _ in visit):
                    await self._taker.encode(visit)
                self._encoded.set()
                self._encoded = trio.Event()

    def _visits(self) -> Iterator[list[tuple[int, int]]]:
        """Chunks to encode at a time, round-robin over the parts, so that no reducer waits."""
        lanes = [deque(chunk_bounds(*span)) for span in dict.fromkeys((p.start, p.stop) for p in self._parts)]
        while lanes:
            for lane in lanes:
                yield [lane.popleft() for _ in range(min(CHUNKS_PER_VISIT, len(lane)))]
            lanes = [lane for lane in lanes if lane]

    async def _send_part(self, part: RosterPart, encoded: dict[int, bytes]) -> None:
        context, roster, link = self._context, self._roster, self._context.links.get(part.reducer)
        try:
            if link is None and part.reducer != context.peer_id:
                raise PeerLostError(f"reducer {part.reducer} is not linked")
            for start, stop in chunk_bounds(part.start, part.stop):
                while start not in encoded:
                    await self._encoded.wait()
                if link is None:
                    self.collect(context.peer_id, start, stop, encoded[start], checked=True)
                else:
                    message = Contribution(roster.lineage, roster.round, roster.attempt, start, stop)
                    await link.send_bulk(message, encoded[start], Traffic.ROUND, compress=True)
                self._unsent -= 1
        except PeerLostError:
            if context.averaging.needs_every_reducer:
                raise

    async def reduce(self, order: Reduce) -> None:
        """Combine the contributors that the leader names, part by part, and serve the result."""
        if self._reduced is not None:
            if order != self._reduced:
                raise RoundFailedError("told to average two sets of contributors")
            return
        self._reduced = order
        self.reducing = True
        try:
            for collection in self._collections:
                await self._reduce(collection, order.contributors)
        finally:
            self.reducing = False

    async def _reduce(self, collection: Collection, contributors: tuple[Contributor, ...]) -> None:
        context, roster = self._context, self._roster
        named = {c.peer_id for c in contributors}
        if len(named) < len(contributors) or not named <= set(roster.members):
            raise RoundFailedError("told to average contributors that are not distinct members")
        senders = tuple(c for c in contributors if c.peer_id in collection.chunks)
        if not senders or not named & collection.chunks.keys() <= collection.complete:
            raise RoundFailedError("told to average a member that is not complete here")
        part, compared = roster.parts[collection.part], context.state.num_stepped
        made = await context.compute(context.averaging.reduce, part, collection.chunks, senders, compared)
        collection.chunks = {}
        for sha256, data in made.blobs:
            context.parts.add(sha256, data)
        sha256s = tuple(sha256 for sha256, _ in made.blobs)
        self._tell(
            roster.attempt.leader,
            Reduced(roster.lineage, roster.round, roster.attempt, collection.part, sha256s, made.gram),
        )
