"""The type of all codecs, `Codec`, and what they share: chunks, sizes, bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.errors import WireError

Blocks = npt.NDArray[np.float32]
Encoded = bytes | memoryview

# 65536 values: as float32 (256 KiB) they stay in a core's second-level cache.
CHUNK_BLOCKS = 1024
FLOAT_MAX = float(np.finfo(np.float32).max)
# Decay per round of values that were not sent (SparseLoCo: error feedback with a moving average). The ternary codec was
# simulated only with this value, too.
ERROR_DECAY = 0.95


@dataclass(frozen=True)
class Codec:
    """One way to code blocks.

    Blocks are coded on their own, except by "topk", which codes each group of 64 blocks on its own.

    Attributes:
        name: as in `RunConfig.round_codec`.
        size_bytes: coded size of a number of blocks. Sizes of runs of whole chunks of `CHUNK_BLOCKS` add up.
        error_decay: with a coarse codec, the sender keeps what it did not send in a buffer, and adds this share of that
            to its next outer gradient. 0: no buffer.
    """

    name: str
    size_bytes: Callable[[int], int]
    _encode: Callable[[Blocks], bytes]
    _decode: Callable[[memoryview, int], Blocks]
    _check: Callable[[memoryview, int], object] | None = None
    _squares: Callable[[memoryview, int], npt.NDArray[np.float64]] | None = None
    error_decay: float = 0.0
    _add: Callable[[memoryview, int, np.float32, Blocks], None] | None = None
    _encode_difference: Callable[[Blocks, Blocks, float], bytes] | None = None

    def encode(self, blocks: Blocks) -> bytes:
        """Code (n, 64) float32 values, only read, into `size_bytes(n)` bytes, the same on every machine.

        Raises ValueError if a value is not finite. Finite ones never raise: what a codec cannot hold saturates.
        """
        return self._encode(np.ascontiguousarray(blocks, np.float32).reshape(-1, BLOCK))

    def encode_difference(self, one: Blocks, other: Blocks, bound: float) -> bytes:
        """Encode `one - other`, as `encode` does. Both are contiguous (n, 64) float32 and only read.

        Raises ValueError if a difference is NaN, or farther than `bound` from 0.
        """
        if self._encode_difference is not None:
            return self._encode_difference(one, other, bound)
        return self._encode(difference(one, other, bound))

    def decode(self, data: Encoded, num_blocks: int) -> Blocks:
        """Return the (num_blocks, 64) float32 values in `data`: fresh, writable, finite, the same bits everywhere.

        Raises WireError if the size is wrong, or `encode` cannot make such bytes.
        """
        return self._decode(self._sized(data, num_blocks), num_blocks)

    def add(self, data: Encoded, num_blocks: int, share: np.float32, total: Blocks) -> None:
        """Add `share` times the values in `data` to (num_blocks, 64) `total`; product and sum are rounded one by one.

        Raises WireError as `decode` does. Finite values may overflow to infinity.
        """
        if self._add is not None:
            self._add(self._sized(data, num_blocks), num_blocks, share, total)
            return
        values = self.decode(data, num_blocks)
        values *= share
        total += values

    def check(self, data: Encoded, num_blocks: int) -> None:
        """Raise the errors that `decode` would raise; with most codecs that is much less work."""
        (self._check or self._decode)(self._sized(data, num_blocks), num_blocks)

    def squared_norm(self, data: Encoded, num_blocks: int, counted: int, bound: float = math.inf) -> float:
        """The squared Euclidean norm of the first `counted` of the decoded blocks, to about float32's precision.

        Raises WireError as `decode` does, and if any value is farther than `bound` from 0.
        """
        view = self._sized(data, num_blocks)
        if self._squares is not None:
            squares = self._squares(view, num_blocks)
            # No value is larger than the norm of its block.
            if squares.max(initial=0) <= bound * bound:
                return float(squares[:counted].sum())
        values = self._decode(view, num_blocks)
        if np.abs(values).max(initial=0) > bound:
            raise WireError(f"a value is beyond {bound:g}")
        # In double precision: the squares of values that are allowed overflow float32.
        return float(np.einsum("ij,ij->", values[:counted], values[:counted], dtype=np.float64))

    def _sized(self, data: Encoded, num_blocks: int) -> memoryview:
        view, size = memoryview(data), self.size_bytes(num_blocks)
        if view.nbytes != size:
            raise WireError(f"{view.nbytes} bytes for {num_blocks} blocks in {self.name}: must be {size}")
        return view


def is_within(values: Blocks, bound: float) -> bool:
    """Whether no value is NaN or farther than `bound` from 0. Makes no copy; `values` is not empty."""
    return bool(-bound <= values.min() and values.max() <= bound)


def difference(one: Blocks, other: Blocks, bound: float) -> Blocks:
    """`one - other`. Raises ValueError if a value is NaN, or farther than `bound` from 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.subtract(one, other)
    if values.size and not is_within(values, bound):
        raise ValueError(f"a value is not finite, or beyond {bound:g}")
    return values


def row_sums(values: Blocks) -> Blocks:
    """(n, 1) sums of (n, 64) values. Halves are added to halves: the order of `sum` depends on the vector unit."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def chunks(num_blocks: int) -> Iterator[slice]:
    """[0, num_blocks) in steps of `CHUNK_BLOCKS`, the last one shorter."""
    return (slice(start, min(start + CHUNK_BLOCKS, num_blocks)) for start in range(0, num_blocks, CHUNK_BLOCKS))


def per_block(size_bytes: int) -> Callable[[int], int]:
    """The size of a codec that codes each block into as many bytes."""
    return lambda num_blocks: num_blocks * size_bytes
