"""Top-k: only the largest values of each chunk, with their positions.

As in SparseLoCo (Sarfi et al., 2025), which keeps 1 to 3 % of each chunk. There the sender remembers what was left out
and sends it later (error feedback): `error_decay`; the buffer is `rounds/moving/snapshot.py`'s.
"""

from __future__ import annotations

import numpy as np

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec.base import CHUNK_BLOCKS, ERROR_DECAY, Blocks, Codec, chunks
from p2ptrain.algorithms.codec.scaled import EIGHT_BITS, INF_BITS, SCALE_BYTES
from p2ptrain.errors import ConfigError, WireError

# The middle of the range that works in SparseLoCo.
DENSITY = 0.02
_POSITION_BYTES = 2


def topk(density: float) -> Codec:
    """Return a codec that keeps round(density · values), at least one, of each chunk of up to 1024 blocks.

    It takes 3 bytes per value kept and 2 for every 64 of them: 4 KB for a chunk of 65,536 values at 2 %. Raises
    ConfigError if the density is not above 0 and at most 1.
    """
    if not 0 < density <= 1:
        raise ConfigError(f"density = {density:g}: must be above 0 and at most 1")

    def size_bytes(num_blocks: int) -> int:
        whole, rest = divmod(num_blocks, CHUNK_BLOCKS)
        return whole * _chunk_bytes(CHUNK_BLOCKS, density) + _chunk_bytes(rest, density)

    def encode(blocks: Blocks) -> bytes:
        return b"".join(_encode_chunk(blocks[chunk], density) for chunk in chunks(len(blocks)))

    def decode(data: memoryview, num_blocks: int) -> Blocks:
        blocks = np.zeros((num_blocks, BLOCK), np.float32)
        for chunk in chunks(num_blocks):
            size = _chunk_bytes(chunk.stop - chunk.start, density)
            _decode_chunk(data[:size], density, blocks[chunk])
            data = data[size:]
        return blocks

    return Codec("topk", size_bytes, encode, decode, error_decay=ERROR_DECAY)


def _kept(num_blocks: int, density: float) -> int:
    return max(1, round(density * num_blocks * BLOCK)) if num_blocks else 0


def _chunk_bytes(num_blocks: int, density: float) -> int:
    kept = _kept(num_blocks, density)
    return kept * (_POSITION_BYTES + 1) + -(-kept // BLOCK) * SCALE_BYTES


def _encode_chunk(blocks: Blocks, density: float) -> bytes:
    """Layout: k positions (uint16, little-endian, ascending), a scale for every 64 values kept, k int8 steps.

    Of equal magnitudes the first are kept.
    """
    values, kept = blocks.reshape(-1), _kept(len(blocks), density)
    # Non-negative floats sort as their bits do, with inf and nan last.
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFF_FFFF)
    if magnitudes.max() >= INF_BITS:
        raise ValueError("a value is not finite")
    smallest = np.partition(magnitudes, values.size - kept)[values.size - kept]
    mask = magnitudes > smallest
    ties = np.flatnonzero(magnitudes == smallest)
    mask[ties[: kept - np.count_nonzero(mask)]] = True
    positions = np.flatnonzero(mask)
    groups = -(-kept // BLOCK)
    compact = np.zeros(groups * BLOCK, np.float32)
    compact[:kept] = values[positions]
    scales, steps = np.empty(groups, "<u2"), np.empty((groups, BLOCK), np.int8)
    EIGHT_BITS.quantise(compact.reshape(-1, BLOCK), scales, steps)
    return positions.astype("<u2").tobytes() + scales.tobytes() + steps.reshape(-1)[:kept].tobytes()


def _decode_chunk(data: memoryview, density: float, out: Blocks) -> None:
    """Decode one chunk into `out`, (n, 64) zeros."""
    kept = _kept(len(out), density)
    groups = -(-kept // BLOCK)
    positions = np.frombuffer(data, "<u2", kept)
    if np.any(positions[1:] <= positions[:-1]) or positions[-1] >= out.size:
        raise WireError("positions are not ascending within the chunk")
    steps = np.zeros(groups * BLOCK, np.int8)
    steps[:kept] = np.frombuffer(data, np.int8, kept, kept * _POSITION_BYTES + groups * SCALE_BYTES)
    scales = np.frombuffer(data, "<u2", groups, kept * _POSITION_BYTES)
    out.reshape(-1)[positions] = EIGHT_BITS.dequantise(scales, steps.reshape(-1, BLOCK)).reshape(-1)[:kept]
