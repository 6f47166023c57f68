"""The anchor and outer momentum of one peer: the state that rounds agree on, bit by bit.

Kept as float32 in CPU memory in the flat layout of the index space. Hashed in chunks of 256 KiB, so that a joiner can
verify what it downloads piece by piece: chunk 2i is the i-th slice of the anchor, chunk 2i+1 that of the momentum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

# 256 KiB of float32 in blocks of 64: one frame, behind which a heartbeat waits for a second on a link of 2 Mbit/s.
STATE_CHUNK_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class StateHashes:
    """SHA-256 of every chunk, and over their list: of all chunks (`state`), and of the anchor's alone."""

    chunks: tuple[str, ...]
    state: str
    anchor: str


class AnchorState:
    """Owns the two vectors. Only the node's side touches it; rounds change it in worker threads, one at a time."""

    def __init__(self, num_blocks: int) -> None:
        self.anchor = np.zeros((num_blocks, 64), np.float32)
        self.momentum = np.zeros((num_blocks, 64), np.float32)
        self.hashes = StateHashes((), "", "")

    @property
    def num_blocks(self) -> int:
        return len(self.anchor)

    @property
    def num_chunks(self) -> int:
        return 2 * -(-self.num_blocks // STATE_CHUNK_BLOCKS)

    def chunk(self, index: int) -> np.ndarray:
        """The live (n, 64) view of one chunk. Raises IndexError."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(index)
        start = index // 2 * STATE_CHUNK_BLOCKS
        vector = self.momentum if index % 2 else self.anchor
        return vector[start : start + STATE_CHUNK_BLOCKS]

    def copy_from(self, other: AnchorState) -> None:
        """Become equal to another state."""
        self.anchor[:], self.momentum[:] = other.anchor, other.momentum
        self.hashes = other.hashes

    def rehash(self) -> None:
        """Compute all hashes. About 0.7 s a GB: call it in a worker thread."""
        self.hashes = combine([hashlib.sha256(self.chunk(i).data).hexdigest() for i in range(self.num_chunks)])

    def anchor_tensor(self) -> torch.Tensor:
        """The live anchor as a (num_blocks, 64) tensor that shares its memory."""
        return torch.from_numpy(self.anchor)


def combine(chunks: list[str] | tuple[str, ...]) -> StateHashes:
    """The hashes over a list of chunk hashes."""
    state = hashlib.sha256("".join(chunks).encode()).hexdigest()
    anchor = hashlib.sha256("".join(chunks[::2]).encode()).hexdigest()
    return StateHashes(tuple(chunks), state, anchor)
