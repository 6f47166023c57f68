"""The chunks of the part that this member averages, as they arrive, and what they measure; and those before the roster.

All chunks are measured, and hashed where members commit to theirs by a Merkle root: a sample would miss a member that
puts all its weight into one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.algorithms.merkle import leaf_hash
from p2ptrain.algorithms.metrics import encoded_gram
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.averaging import Chunks
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.deciding.record import most_square
from p2ptrain.protocol.rounds.deciding.timeouts import SLOWEST_BYTES_S, Timeouts
from p2ptrain.protocol.wire.messages import Contribution, Contributor, RosterPart
from p2ptrain.protocol.wire.transport import PeerId

# Chunks before the roster: at most this many encoded models in all, and one of each member.
MOST_EARLY_MODELS = 2
# Outer gradients are compared in pairs if there are at most MAX_COMPARED, in about SAMPLED_CHUNKS of each part.
MAX_COMPARED = 16
SAMPLED_CHUNKS = 8
# Chunks that a worker thread measures at a time: each visit costs as much CPU as measuring five (measured, int8).
CHUNKS_MEASURED = 16


def check_bytes(codec: Codec, start: int, stop: int, data: Encoded) -> None:
    """Raises WireError unless these bytes have the size of one chunk and decode."""
    if len(data) != codec.size_bytes(stop - start):
        raise WireError(f"chunk [{start}, {stop}) has {len(data)} bytes, not {codec.size_bytes(stop - start)}")
    codec.check(data, stop - start)


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A chunk of a member that was not measured yet."""

    sender: PeerId
    start: int
    data: Encoded


@dataclass(frozen=True, slots=True)
class Measured:
    """A chunk's squared norm, and its leaf hash (empty if the run has no audits)."""

    sender: PeerId
    start: int
    squared_norm: float
    leaf: bytes


class Collection:
    """The chunks of one part.

    Args:
        senders: the members that send it.
        num_stepped: the number of the vector's blocks, from the first, that are outer gradients: only these count for
            norms and products.
        audited: whether members commit to their chunks.

    Attributes:
        chunks: by sender, then by first block.
        complete, failed: senders whose chunks are all here, and senders that were excluded.
        norms: squared norms of members whose chunks were all measured.
        roots: the Merkle roots of the same members, checked; empty ones if not `audited`.
    """

    def __init__(
        self,
        part: RosterPart,
        senders: Sequence[PeerId],
        grid: Grid,
        codec: Codec,
        timeouts: Timeouts,
        now: float,
        *,
        num_stepped: int,
        audited: bool,
    ) -> None:
        self.complete: set[PeerId] = set()
        self.failed: set[PeerId] = set()
        self.chunks: Chunks = {sender: {} for sender in senders}
        self.norms: dict[PeerId, float] = {}
        self.roots: dict[PeerId, bytes] = {}
        self._part = part
        self._grid = grid
        self._codec = codec
        self._timeouts = timeouts
        self._num_stepped = num_stepped
        self._audited = audited
        self._bounds = dict(grid.bounds(part.start, part.stop))
        # A chunk on the slowest line, which carries one to each reducer.
        self._slowest_s = len(senders) * codec.size_bytes(grid.chunk_blocks) / SLOWEST_BYTES_S
        # Of senders whose chunks are awaited.
        self._progress_at = dict.fromkeys(senders, now)
        self._unmeasured: list[ReceivedChunk] = []
        self._measured: dict[PeerId, dict[int, Measured]] = {sender: {} for sender in senders}
        self._seals: dict[PeerId, tuple[bytes, tuple[bytes, ...]]] = {}

    def add(self, sender: PeerId, message: Contribution, data: Encoded, now: float, *, checked: bool = False) -> bool:
        """Add one chunk; False if it is not awaited. Raises WireError if it is off the plan or does not decode.

        Args:
            checked: the bytes were checked before, or are our own.
        """
        start, stop = message.start, message.stop
        if sender not in self._progress_at:
            return False
        if self._bounds.get(start) != stop:
            raise WireError(f"chunk [{start}, {stop}) is not of part [{self._part.start}, {self._part.stop})")
        if not checked:
            check_bytes(self._codec, start, stop, data)
        chunks = self.chunks[sender]
        if start in chunks:
            # The first one was measured, and hashed.
            return False
        chunks[start] = data
        self._unmeasured.append(ReceivedChunk(sender, start, data))
        if message.root:
            self._seals[sender] = message.root, message.proof
        self._timeouts.note_wait(sender, now - self._progress_at[sender])
        self._progress_at[sender] = now
        if len(chunks) == len(self._bounds):
            self.complete.add(sender)
            del self._progress_at[sender]
        return True

    def fail(self, sender: PeerId) -> bool:
        """Exclude a sender; True if it was awaited."""
        if self._progress_at.pop(sender, None) is None:
            return False
        self.failed.add(sender)
        self.chunks[sender] = {}
        return True

    def clear(self) -> None:
        """Drop all chunks, and await no more."""
        self.chunks, self._progress_at = {}, {}

    def give_up_stalled(self, now: float, rtt_s: dict[PeerId, float]) -> bool:
        """Exclude awaited senders that made no progress for too long, except the reducer; True if there were any.

        Our own chunks come when our worker threads have time: they cannot be lost, and without them nobody else gets
        ours either.
        """
        stalled = [
            sender
            for sender, at in self._progress_at.items()
            if sender != self._part.reducer
            and now - at > self._timeouts.stall_s(sender, rtt_s.get(sender, 0.0), self._slowest_s)
        ]
        for sender in stalled:
            self._timeouts.note_wait(sender, now - self._progress_at[sender])
            self.fail(sender)
        return bool(stalled)

    def take_unmeasured(self, threads: int) -> list[ReceivedChunk]:
        """Chunks to measure in so many worker threads; empty while it is better to wait for more."""
        if len(self._unmeasured) < CHUNKS_MEASURED and self.complete <= self.norms.keys():
            return []
        most = CHUNKS_MEASURED * threads
        taken, self._unmeasured = self._unmeasured[:most], self._unmeasured[most:]
        return taken

    def measure(self, chunk: ReceivedChunk) -> Measured:
        """Measure a chunk. Changes nothing; for worker threads."""
        num_blocks, counted = self._bounds[chunk.start] - chunk.start, max(0, self._num_stepped - chunk.start)
        square = self._codec.squared_norm(chunk.data, num_blocks, counted)
        return Measured(chunk.sender, chunk.start, square, leaf_hash(chunk.data) if self._audited else b"")

    def note(self, chunks: Sequence[Measured]) -> dict[PeerId, WireError]:
        """Take the results of `measure`; exclude and return members with chunks too large or not under their root."""
        refused: dict[PeerId, WireError] = {}
        for chunk in chunks:
            measured = self._measured[chunk.sender]
            measured[chunk.start] = chunk
            if len(measured) == len(self._bounds):
                try:
                    square, root = self._square_of(chunk.sender), self._root_of(chunk.sender)
                    self.norms[chunk.sender], self.roots[chunk.sender] = square, root
                except WireError as error:
                    refused[chunk.sender] = error
                    self.complete.discard(chunk.sender)
                    self.failed.add(chunk.sender)
                    self.chunks[chunk.sender] = {}
        return refused

    def _square_of(self, sender: PeerId) -> float:
        measured, most = self._measured[sender], most_square(self._part.stop - self._part.start)
        square = sum(measured[start].squared_norm for start in self._bounds)
        if not square <= most:
            # The leader would refuse our report.
            raise WireError(f"its outer gradient has squared norm {square:.3g}: must be at most {most:.3g}")
        return square

    def _root_of(self, sender: PeerId) -> bytes:
        if not self._audited:
            return b""
        root, proof = self._seals.get(sender, (b"", ()))
        leaves = [self._measured[sender][start].leaf for start in self._bounds]
        self._grid.check_leaves(leaves, self._part.start, proof, root)
        return root

    def gram(self, contributors: Sequence[Contributor]) -> Callable[[], tuple[float, ...]]:
        """What computes the inner products of the contributors' outer gradients in this part, row by row.

        They are estimated from a sample of chunks, and left out if there are too many contributors. Call the result in
        a worker thread. It holds the chunks of the sample, which may be dropped here meanwhile.
        """
        if len(contributors) > MAX_COMPARED:
            return tuple
        comparable = {
            start: min(stop, self._num_stepped) - start
            for start, stop in self._bounds.items()
            if start < self._num_stepped
        }
        sampled = dict(list(comparable.items())[:: max(1, len(comparable) // SAMPLED_CHUNKS)])
        encoded = {start: [self.chunks[c.peer_id][start] for c in contributors] for start in sampled}

        def work() -> tuple[float, ...]:
            products = np.zeros((len(contributors), len(contributors)))
            for start, count in sampled.items():
                products += encoded_gram(encoded[start], self._codec, self._bounds[start] - start, count)
            products *= sum(comparable.values()) / max(1, sum(sampled.values()))
            return tuple(products.ravel().tolist())

        return work


class EarlyChunks:
    """Chunks received before the roster, bounded by `MOST_EARLY_MODELS`.

    Attributes:
        overrun: members whose chunk was dropped for lack of room, or whose link broke; they cannot become complete.
    """

    def __init__(self, codec: Codec, grid: Grid) -> None:
        self.overrun: set[PeerId] = set()
        self._codec = codec
        self._grid = grid
        self._model_bytes = codec.size_bytes(grid.num_blocks)
        self._held: dict[PeerId, dict[tuple[int, int], tuple[Contribution, bytes]]] = {}
        self._held_bytes: dict[PeerId, int] = {}

    def add(self, sender: PeerId, message: Contribution, data: bytes) -> None:
        """Keep one chunk, or mark its sender as overrun. Raises WireError if it fits no roster."""
        start, stop = message.start, message.stop
        self._grid.check_chunk(start, stop)
        held, held_bytes = self._held.setdefault(sender, {}), self._held_bytes.get(sender, 0)
        if (start, stop) in held or sender in self.overrun:
            return
        check_bytes(self._codec, start, stop, data)
        in_all = sum(self._held_bytes.values()) + len(data)
        if held_bytes + len(data) > self._model_bytes or in_all > MOST_EARLY_MODELS * self._model_bytes:
            self.overrun.add(sender)
            self._held[sender], self._held_bytes[sender] = {}, 0
            return
        held[start, stop] = message, data
        self._held_bytes[sender] = held_bytes + len(data)

    def take(self) -> Iterator[tuple[PeerId, Contribution, bytes]]:
        """Remove and yield all chunks."""
        held, self._held, self._held_bytes = self._held, {}, {}
        for sender, chunks in held.items():
            for message, data in chunks.values():
                yield sender, message, data
