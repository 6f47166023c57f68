"""The state that rounds agree on bit by bit: the anchor and the outer optimizer's moments.

It is float32 in CPU memory, in the flat layout of the index space, and hashed in chunks of 256 KiB, so that a joiner
can verify each chunk. The chunks of all vectors alternate: with one moment, chunk 2i belongs to the anchor and chunk
2i+1 to the moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.algorithms.codec import is_within
from p2ptrain.algorithms.indexspace import IndexSpace
from p2ptrain.errors import ConfigError

# 256 KiB of float32 in blocks of 64: one frame, which delays a heartbeat by a second on a link of 2 Mbit/s.
STATE_CHUNK_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class StateHashes:
    """BLAKE3 of every chunk, of all chunk hashes (`state`), and of the anchor's chunk hashes (`anchor`)."""

    chunks: tuple[str, ...]
    state: str
    anchor: str


def chunk_hash(data: bytes | memoryview) -> str:
    """The hash of one chunk, as hexadecimal text; a tree hash, four times as fast as SHA-256."""
    return blake3(memoryview(data).cast("B")).hexdigest()


class AnchorState:
    """Owns the vectors. Only the node uses it. Rounds change it in worker threads, but each chunk only in one."""

    def __init__(
        self, num_blocks: int, num_moments: int, num_stepped: int | None = None, anchor: np.ndarray | None = None
    ) -> None:
        """
        Args:
            num_blocks: blocks of each vector.
            num_moments: moments of the outer optimizer.
            num_stepped: the outer step applies to this many first blocks (None: all). The rest are only averaged.
            anchor: memory for the anchor, float32 of [num_blocks, 64], all zero; None for new memory.
        """
        self.num_stepped = num_blocks if num_stepped is None else num_stepped
        self.anchor = np.zeros((num_blocks, 64), np.float32) if anchor is None else anchor
        self.moments = [np.zeros((num_blocks, 64), np.float32) for _ in range(num_moments)]
        self.hashes = StateHashes((), "", "")

    @property
    def num_blocks(self) -> int:
        return len(self.anchor)

    @property
    def vectors(self) -> list[np.ndarray]:
        """The anchor, then the moments."""
        return [self.anchor, *self.moments]

    @property
    def num_slices(self) -> int:
        """Chunks of each vector."""
        return -(-self.num_blocks // STATE_CHUNK_BLOCKS)

    @property
    def num_chunks(self) -> int:
        return self.num_slices * len(self.vectors)

    def chunks_within(self, first: int, end: int) -> range:
        """Numbers of the chunks of all vectors that hold any of blocks [first, end)."""
        vectors = len(self.vectors)
        return range(first // STATE_CHUNK_BLOCKS * vectors, -(-end // STATE_CHUNK_BLOCKS) * vectors)

    def chunk(self, index: int) -> np.ndarray:
        """The live (n, 64) view of one chunk. Raises IndexError."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(index)
        piece, vector = divmod(index, len(self.vectors))
        start = piece * STATE_CHUNK_BLOCKS
        return self.vectors[vector][start : start + STATE_CHUNK_BLOCKS]

    def blank(self) -> AnchorState:
        """A state of the same shape, all zero."""
        return AnchorState(self.num_blocks, len(self.moments), self.num_stepped)

    def copy_from(self, other: AnchorState) -> None:
        """Copy another state."""
        for ours, theirs in zip(self.vectors, other.vectors, strict=True):
            ours[:] = theirs
        self.hashes = other.hashes

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite. About 0.3 s a GB: call it in a worker thread."""
        return all(bool(np.isfinite(self.chunk(i)).all()) for i in range(self.num_chunks))

    def rehash(self) -> None:
        """Compute all hashes. About 0.2 s a GB: call it in a worker thread."""
        self.hashes = self.combine([self.chunk_hash(i) for i in range(self.num_chunks)])

    def chunk_hash(self, index: int) -> str:
        """The hash of a chunk, computed anew. Call it in a worker thread."""
        return chunk_hash(self.chunk(index).data)

    def combine(self, chunks: Sequence[str]) -> StateHashes:
        """The hashes over a list of chunk hashes."""
        state = blake3("".join(chunks).encode()).hexdigest()
        anchor = blake3("".join(chunks[:: len(self.vectors)]).encode()).hexdigest()
        return StateHashes(tuple(chunks), state, anchor)

    def anchor_tensor(self) -> torch.Tensor:
        """The live anchor as a (num_blocks, 64) tensor that shares its memory."""
        return torch.from_numpy(self.anchor)


def check_founding(anchor: npt.NDArray[np.float32], space: IndexSpace) -> None:
    """Raises ConfigError if these weights, (num_blocks, 64), cannot found a run: every joiner gets them."""
    for name, start, stop in zip(space.names, space.tensor_starts, space.tensor_starts[1:], strict=False):
        values = anchor[start:stop]
        if values.size and not is_within(values, MAX_GRADIENT):
            with np.errstate(invalid="ignore"):
                count = int((~(np.abs(values) <= MAX_GRADIENT)).sum())
            raise ConfigError(
                f"{name}: {count} of its values are NaN, infinite or beyond {MAX_GRADIENT:g}, and a run starts from "
                "finite weights; initialise the model again, or load other weights"
            )
