"""topk: the largest values of each group of 4096, in 14 bits each: 12 for the position, 2 for one of four levels.

As in SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706). The levels are the means of four bins, 1.5 standard deviations
of the kept values wide, around their mean: about a small and a large one of either sign. In SparseLoCo groups do not
cross tensors, and all groups of a tensor share four levels. Here each group has its own, which was as good with AdamW,
and 0.05 nats worse with Muon (docs/evidence/late.md).
What was left out is sent later (error feedback): `error_decay`; the buffer is `rounds/moving/snapshot.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec.base import ERROR_DECAY, Blocks, Codec
from p2ptrain.algorithms.codec.scaled import INF_BITS, SCALE_MIN, scale_values
from p2ptrain.errors import ConfigError, WireError

# SparseLoCo: 1 to 3 %. 64 of 4096 at H = 5 were better than 128 at H = 10, of the same bytes (docs/evidence/late.md).
DENSITY = 1 / 64
GROUP_BLOCKS = 64
# A kept value is position · 4 + level; four of them fill seven bytes.
_LEVELS, _QUAD_BYTES = 4, 7
_BITS = np.arange(4, dtype=np.uint64) * np.uint64(14)
# Width of a bin in standard deviations: SparseLoCo has four bins in a range of six.
_BIN_STDS = 1.5
# The last finite bfloat16 pattern, and the sign of one.
_LEVEL_MAX, _SIGN = 0x7F7F, 0x8000


def topk(density: float) -> Codec:
    """Return a codec that keeps round(density · values), at least one, of each group of up to 64 blocks.

    A group takes 8 bytes and 7 for every four values kept. Raises ConfigError if the density is not above 0 and at most
    1.
    """
    if not 0 < density <= 1:
        raise ConfigError(f"density = {density:g}: must be above 0 and at most 1")

    def kept(num_blocks: int) -> int:
        return max(1, round(density * num_blocks * BLOCK))

    def group_bytes(num_blocks: int) -> int:
        return 2 * _LEVELS + -(-kept(num_blocks) // 4) * _QUAD_BYTES if num_blocks else 0

    def size_bytes(num_blocks: int) -> int:
        whole, rest = divmod(num_blocks, GROUP_BLOCKS)
        return whole * group_bytes(GROUP_BLOCKS) + group_bytes(rest)

    def encode(blocks: Blocks) -> bytes:
        equal = _equal_groups(len(blocks))
        return b"".join(_encode(blocks[span].reshape(-1, size * BLOCK), kept(size)) for span, size in equal)

    def decode(data: memoryview, num_blocks: int) -> Blocks:
        blocks, start = np.zeros((num_blocks, BLOCK), np.float32), 0
        for span, size in _equal_groups(num_blocks):
            groups = blocks[span].reshape(-1, size * BLOCK)
            stop = start + len(groups) * group_bytes(size)
            _decode(np.frombuffer(data[start:stop], np.uint8).reshape(len(groups), -1), kept(size), groups)
            start = stop
        return blocks

    return Codec("topk", size_bytes, encode, decode, error_decay=ERROR_DECAY)


def _equal_groups(num_blocks: int) -> Iterator[tuple[slice, int]]:
    """The blocks of groups of one size, with this size: those of the whole groups, and of the shorter last one."""
    whole = num_blocks // GROUP_BLOCKS * GROUP_BLOCKS
    if whole:
        yield slice(whole), GROUP_BLOCKS
    if whole < num_blocks:
        yield slice(whole, num_blocks), num_blocks - whole


def _encode(groups: Blocks, kept: int) -> bytes:
    """Layout of each group: its levels (bfloat16), then its kept values in ascending order of position.

    Both are little-endian. Of equal magnitudes the first are kept. Sums are those of `bincount`, which adds in order.
    """
    count, size = groups.shape
    # Non-negative floats sort as their bits do, with inf and nan last.
    magnitudes = groups.view(np.uint32) & np.uint32(0x7FFF_FFFF)
    if magnitudes.max() >= INF_BITS:
        raise ValueError("a value is not finite")
    smallest = np.partition(magnitudes, size - kept, axis=1)[:, size - kept, None]
    mask = magnitudes >= smallest
    if np.count_nonzero(mask) > count * kept:
        ties = magnitudes == smallest
        wanted = kept - np.count_nonzero(magnitudes > smallest, axis=1)
        mask &= ~ties | (np.cumsum(ties, axis=1) <= wanted[:, None])
    places = np.flatnonzero(mask)
    rows, positions = places // size, places % size
    values = groups.reshape(-1)[places].astype(np.float64)

    deviations = values - (np.bincount(rows, values) / kept)[rows]
    width = (_BIN_STDS * np.sqrt(np.bincount(rows, np.square(deviations)) / kept))[rows]
    levels = (deviations >= -width).astype(np.int64) + (deviations >= 0) + (deviations >= width)
    if (zeros := values == 0).any():
        # Kept as there are no others. They have a level of their own, so that they stay zero.
        levels = np.where(zeros, 0, np.maximum(levels, np.bincount(rows, zeros)[rows] > 0))
    bins = _LEVELS * rows + levels
    sums, sizes = np.bincount(bins, values, _LEVELS * count), np.bincount(bins, minlength=_LEVELS * count)
    means = (sums / np.maximum(sizes, 1)).astype(np.float32)
    # To the nearest bfloat16, which is never subnormal, so that a CPU that flushes subnormals decodes the same.
    bits = np.clip((np.abs(means).view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16), SCALE_MIN, _LEVEL_MAX)
    table = ((bits | (means < 0) * np.uint32(_SIGN)) * (means != 0)).astype("<u2").reshape(count, _LEVELS)

    entries = np.zeros((count, -(-kept // 4) * 4), np.uint64)
    entries[:, :kept] = (positions * _LEVELS + levels).reshape(count, kept)
    quads = np.bitwise_or.reduce(entries.reshape(count, -1, 4) << _BITS, axis=2).astype("<u8")
    packed = quads[..., None].view(np.uint8)[..., :_QUAD_BYTES].reshape(count, -1)
    return np.hstack([table.view(np.uint8), packed]).tobytes()


def _decode(data: npt.NDArray[np.uint8], kept: int, groups: Blocks) -> None:
    """Decode (n, bytes) into (n, values) `groups` of zeros."""
    count, size = groups.shape
    table = np.ascontiguousarray(data[:, : 2 * _LEVELS]).view("<u2")
    magnitudes = table & np.uint16(_SIGN - 1)
    if not np.all((table == 0) | ((magnitudes >= SCALE_MIN) & (magnitudes <= _LEVEL_MAX))):
        raise WireError("a level is subnormal or not finite")
    packed = data[:, 2 * _LEVELS :].reshape(count, -1, _QUAD_BYTES)
    quads = np.zeros((*packed.shape[:2], 8), np.uint8)
    quads[..., :_QUAD_BYTES] = packed
    entries = ((quads.view("<u8") >> _BITS) & np.uint64(0x3FFF)).astype(np.int64).reshape(count, -1)
    positions, rows = entries[:, :kept] // _LEVELS, np.arange(count)[:, None]
    if np.any(positions[:, 1:] <= positions[:, :-1]) or np.any(positions[:, -1] >= size) or entries[:, kept:].any():
        raise WireError("positions are not ascending within the group, or padding is not zero")
    groups[rows, positions] = scale_values(table.ravel()).reshape(count, _LEVELS)[rows, entries[:, :kept] % _LEVELS]
