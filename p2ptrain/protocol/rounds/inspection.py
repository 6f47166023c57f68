"""What a reducer learns from the chunks of its part before it averages them: each member's norm and commitment.

Chunks are measured in worker threads in groups while others arrive. All of them are: a sample would miss a member
that puts all its weight into one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.algorithms.merkle import leaf_hash
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.checks import most_square
from p2ptrain.protocol.rounds.grid import Grid
from p2ptrain.protocol.wire.messages import RosterPart
from p2ptrain.protocol.wire.transport import PeerId

# Chunks that a worker thread measures at a time: each visit costs as much CPU as measuring five (measured, int8).
CHUNKS_MEASURED = 16


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


class Inspection:
    """The measures of one part. `sealed`: whether members commit to their chunks by a Merkle root.

    Attributes:
        norms: squared norms of members whose chunks were all measured.
        roots: the Merkle roots of the same members, checked; empty ones if not `sealed`.
    """

    def __init__(self, part: RosterPart, codec: Codec, grid: Grid, *, compared: int, sealed: bool) -> None:
        self.norms: dict[PeerId, float] = {}
        self.roots: dict[PeerId, bytes] = {}
        self._codec = codec
        self._compared = compared
        self._sealed = sealed
        self._bounds = dict(grid.bounds(part.start, part.stop))
        self._most_square = most_square(part.stop - part.start)
        self._start = part.start
        self._grid = grid
        self._unmeasured: list[ReceivedChunk] = []
        self._seals: dict[PeerId, tuple[bytes, tuple[bytes, ...]]] = {}
        self._measured: dict[PeerId, dict[int, Measured]] = {}

    def add(self, sender: PeerId, start: int, data: Encoded, root: bytes, proof: tuple[bytes, ...]) -> None:
        """Note a chunk that was checked. Call it once for each chunk."""
        self._unmeasured.append(ReceivedChunk(sender, start, data))
        if root:
            self._seals[sender] = root, proof

    def take(self, complete: set[PeerId], threads: int) -> list[ReceivedChunk]:
        """Chunks to measure in so many worker threads; empty while it is better to wait for more."""
        if len(self._unmeasured) < CHUNKS_MEASURED and complete <= self.norms.keys():
            return []
        most = CHUNKS_MEASURED * threads
        taken, self._unmeasured = self._unmeasured[:most], self._unmeasured[most:]
        return taken

    def measure(self, chunk: ReceivedChunk) -> Measured:
        """Measure a chunk. Only blocks that are outer gradients count. Changes nothing; for worker threads."""
        num_blocks, counted = self._bounds[chunk.start] - chunk.start, max(0, self._compared - chunk.start)
        square = self._codec.squared_norm(chunk.data, num_blocks, counted)
        return Measured(chunk.sender, chunk.start, square, leaf_hash(chunk.data) if self._sealed else b"")

    def note(self, chunks: Sequence[Measured]) -> dict[PeerId, WireError]:
        """Take the results of `measure`. Returns the members whose chunks are too large or not under their root."""
        refused: dict[PeerId, WireError] = {}
        for chunk in chunks:
            of_sender = self._measured.setdefault(chunk.sender, {})
            of_sender[chunk.start] = chunk
            if len(of_sender) == len(self._bounds):
                try:
                    square = self._square_of(chunk.sender)
                    self.roots[chunk.sender] = self._root_of(chunk.sender)
                    self.norms[chunk.sender] = square
                except WireError as error:
                    refused[chunk.sender] = error
        return refused

    def _square_of(self, sender: PeerId) -> float:
        of_sender, most = self._measured[sender], self._most_square
        square = sum(of_sender[start].squared_norm for start in self._bounds)
        if not square <= most:
            # The leader would refuse our report.
            raise WireError(f"its outer gradient has squared norm {square:.3g}: must be at most {most:.3g}")
        return square

    def _root_of(self, sender: PeerId) -> bytes:
        if not self._sealed:
            return b""
        root, proof = self._seals.get(sender, (b"", ()))
        leaves = [self._measured[sender][start].leaf for start in self._bounds]
        self._grid.check_leaves(leaves, self._start, proof, root)
        return root
