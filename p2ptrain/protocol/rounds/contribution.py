"""What one member brings to a round: its outer gradient, encoded once, and later what the outcome does to its weights.

The vector is cut into chunks of 1024 blocks, on a grid that all peers share and codecs code alone. The parts of an
attempt are runs of chunks, so a second attempt with other parts sends the very same bytes. A chunk has 66 KiB as int8,
256 KiB as fp32: small enough that a control frame never waits long behind one on a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from p2ptrain.algorithms.codec import CHUNK_BLOCKS, Codec
from p2ptrain.algorithms.outer import outer_step
from p2ptrain.errors import WireError
from p2ptrain.protocol.anchor import AnchorState

# Chunks handled in one visit to the worker thread: 1 MiB of int8.
CHUNKS_PER_VISIT = 16


def chunk_bounds(start: int, stop: int) -> list[tuple[int, int]]:
    """The chunks of blocks [start, stop); start lies on the grid."""
    assert start % CHUNK_BLOCKS == 0
    return [(low, min(low + CHUNK_BLOCKS, stop)) for low in range(start, stop, CHUNK_BLOCKS)]


def split_parts(num_blocks: int, reducers: int) -> list[tuple[int, int]]:
    """At most `reducers` runs of whole chunks, as equal as can be, that cover all blocks in order."""
    chunks = -(-num_blocks // CHUNK_BLOCKS)
    count = min(chunks, reducers)
    edges = [i * chunks // count * CHUNK_BLOCKS for i in range(count)] + [num_blocks]
    return [(edges[i], edges[i + 1]) for i in range(count)]


def check_parts(parts: list[tuple[int, int]], num_blocks: int) -> None:
    """Raises WireError unless the parts cover [0, num_blocks) in order, each starting on the grid."""
    position = 0
    for start, stop in parts:
        if start != position or stop <= start or start % CHUNK_BLOCKS:
            raise WireError(f"part [{start}, {stop}) does not continue at block {position}")
        position = stop
    if position != num_blocks:
        raise WireError(f"parts end at block {position} of {num_blocks}")


@dataclass(slots=True)
class OwnContribution:
    """A snapshot on its way through a round.

    `buffer` holds the snapshot's weights until a chunk is encoded, then what its bytes decode to, and at the end
    (after `apply_outcome`) what must be added to the live weights: one vector from start to finish.
    """

    buffer: torch.Tensor
    tokens: int
    steps: int
    run_step: int
    at_length: bool
    held_s: float
    chunks: dict[int, bytes]

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: list[tuple[int, int]]) -> None:
        """Encode these chunks of anchor − weights; chunks that were encoded before are left alone."""
        weights = self.buffer.numpy()
        for start, stop in bounds:
            if start in self.chunks:
                continue
            gradient = np.subtract(anchor[start:stop], weights[start:stop])
            encoded = codec.encode(gradient)
            weights[start:stop] = codec.decode(encoded, stop - start)
            self.chunks[start] = encoded


def apply_outcome(
    state: AnchorState,
    codec: Codec,
    mean: bytes | bytearray,
    part: tuple[int, int],
    outer_lr: float,
    outer_momentum: float,
    buffer: np.ndarray | None,
) -> None:
    """Take the outer step on one part's blocks, in place: A, m ← step(A, m, decode(mean)).

    Args:
        mean: the part's encoded mean outer gradient, already verified by hash.
        buffer: a contributor's (num_blocks, 64): holds decode(own sent bytes), becomes A′ − A + decode(own sent bytes).
    """
    start, stop = part
    # Without momentum the step is a plain average, which leaves the momentum alone.
    optimizer = "nesterov" if outer_momentum else "sgd"
    for low, high in chunk_bounds(start, stop):
        gradient = _decode_chunk(codec, mean, start, low, high)
        anchor = state.anchor[low:high]
        before = anchor.copy()
        outer_step(
            optimizer, anchor, [state.momentum[low:high]], gradient, lr=outer_lr, momentum=outer_momentum, round_=0
        )
        if buffer is not None:
            buffer[low:high] += np.subtract(anchor, before, out=before)


def check_decodes(codec: Codec, mean: bytes | bytearray, part: tuple[int, int]) -> None:
    """Raises WireError unless every chunk of a part decodes: done before READY, so that no outcome half applies."""
    start, stop = part
    if len(mean) != codec.size_bytes(stop - start):
        raise WireError(f"part [{start}, {stop}) has {len(mean)} bytes")
    for low, high in chunk_bounds(start, stop):
        _decode_chunk(codec, mean, start, low, high)


def _decode_chunk(codec: Codec, mean: bytes | bytearray, start: int, low: int, high: int) -> np.ndarray:
    """Blocks [low, high) of a part that starts at block `start`."""
    coded = memoryview(mean)[codec.size_bytes(low - start) : codec.size_bytes(high - start)]
    return codec.decode(coded, high - low)
