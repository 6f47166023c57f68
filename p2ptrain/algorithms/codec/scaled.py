"""int8 and int4 with a scale per 64 values.

The scale is a bfloat16, rounded *up* so that no value needs more than 127 (int4: 7) steps, and never subnormal, so that
a CPU that flushes subnormals decodes the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec.base import FLOAT_MAX, Blocks, Codec, chunks, difference, per_block
from p2ptrain.errors import WireError

Scales = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]
Norms = npt.NDArray[np.float64]

SCALE_BYTES = 2
INF_BITS = np.uint32(0x7F80_0000)
# The bfloat16 pattern of the smallest normal number.
SCALE_MIN = 0x0080


class Loops(Protocol):
    """The loops over n blocks and their code: n scales (bfloat16, little-endian), then the packed steps of n blocks.

    `StepWidth` has them in numpy, `_Native` in C; both give the same bits. They change none of their arguments except
    `total`.
    """

    def encode(self, blocks: Blocks, minus: Blocks | None, bound: float) -> bytes:
        """Code `blocks`, or `blocks - minus`. Raises ValueError if a value is NaN, or farther than `bound` from 0."""
        ...

    def decode(self, data: memoryview, num_blocks: int) -> Blocks:
        """Return step · scale. Raises WireError, as the two below do, on a scale that `encode` does not make."""
        ...

    def add(self, data: memoryview, num_blocks: int, share: np.float32, total: Blocks) -> None:
        """Add `share` · (step · scale) to `total`."""
        ...

    def squares(self, data: memoryview, num_blocks: int) -> Norms:
        """Return the squared norms of the blocks, (n,)."""
        ...


@dataclass(frozen=True)
class StepWidth:
    """Symmetric integers of one width, 8 or 4 bits: the numpy reference of `Loops`."""

    bits: int
    most: np.float32  # the largest step that encoding makes
    scale_max: int  # the last bfloat16 pattern with which the lowest step, -most - 1, is finite

    @property
    def block_bytes(self) -> int:
        """The size of a coded block."""
        return SCALE_BYTES + BLOCK * self.bits // 8

    def quantise(self, blocks: Blocks, scales: Scales, steps: Steps) -> None:
        """Write the scales of (n, 64) finite values into (n,) `scales` and their steps into (n, 64) `steps`.

        Beyond `most` times the largest scale, values saturate. Raises ValueError if a value is not finite.
        """
        # The bit patterns of non-negative floats are in the order of the floats, with inf and nan above all.
        peaks = (blocks.view(np.uint32) & np.uint32(0x7FFF_FFFF)).max(axis=1)
        if (peaks >= INF_BITS).any():
            raise ValueError("a value is not finite")
        bits = ((peaks.view(np.float32) / self.most).view(np.uint32) + np.uint32(0xFFFF)) >> 16
        # `np.clip` and `np.where` take longer than these, and a small fragment takes as long as its calls.
        np.minimum(np.maximum(bits, SCALE_MIN, out=bits), self.scale_max, out=bits)
        bits *= peaks > 0
        scales[:] = bits
        scale = (bits << 16).view(np.float32)
        exact = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None] * blocks
        np.rint(exact, out=exact)
        np.copyto(steps, np.clip(exact, -self.most, self.most, out=exact), casting="unsafe")

    def dequantise(self, scales: Scales, steps: Steps) -> Blocks:
        """Return (n, 64) step · scale. Raises WireError on a scale that `quantise` does not make; any step is fine."""
        self._check(scales)
        return np.multiply(steps, scale_values(scales)[:, None], dtype=np.float32)

    def check(self, data: memoryview, num_blocks: int) -> None:
        """Raises WireError on a scale in coded blocks that `encode` does not make."""
        self._check(np.frombuffer(data, "<u2", num_blocks))

    def encode(self, blocks: Blocks, minus: Blocks | None, bound: float) -> bytes:
        scales = np.empty(len(blocks), "<u2")
        steps = np.empty((len(blocks), BLOCK), np.int8)
        for chunk in chunks(len(blocks)):
            values = blocks[chunk] if minus is None else difference(blocks[chunk], minus[chunk], bound)
            self.quantise(values, scales[chunk], steps[chunk])
        return scales.tobytes() + self._pack(steps).tobytes()

    def decode(self, data: memoryview, num_blocks: int) -> Blocks:
        return self.dequantise(*self._split(data, num_blocks))

    def add(self, data: memoryview, num_blocks: int, share: np.float32, total: Blocks) -> None:
        values = self.decode(data, num_blocks)
        values *= share
        total += values

    def squares(self, data: memoryview, num_blocks: int) -> Norms:
        scales, steps = self._split(data, num_blocks)
        self._check(scales)
        values = steps.astype(np.float32)
        of_steps: npt.NDArray[np.float32] = np.einsum("ij,ij->i", values, values)
        return np.square(scale_values(scales).astype(np.float64)) * of_steps

    def _check(self, scales: Scales) -> None:
        if not np.all((scales == 0) | ((scales >= SCALE_MIN) & (scales <= self.scale_max))):
            raise WireError("a scale is negative, subnormal, too large or not finite")

    def _split(self, data: memoryview, num_blocks: int) -> tuple[Scales, Steps]:
        packed = np.frombuffer(data, np.uint8, offset=SCALE_BYTES * num_blocks)
        packed = packed.reshape(num_blocks, self.block_bytes - SCALE_BYTES)
        if self.bits == 8:
            return np.frombuffer(data, "<u2", num_blocks), packed.view(np.int8)
        # The shift to the right copies the sign.
        steps = np.hstack([(packed << 4).view(np.int8) >> 4, packed.view(np.int8) >> 4])
        return np.frombuffer(data, "<u2", num_blocks), steps

    def _pack(self, steps: Steps) -> Bytes:
        """Byte i of an int4 block holds step i in its low half, step i + 32 in its high half."""
        packed = steps.view(np.uint8)
        if self.bits == 8:
            return packed
        return (packed[:, : BLOCK // 2] & np.uint8(15)) | (packed[:, BLOCK // 2 :] << np.uint8(4))


# -128 · 2^121 and -8 · 2^125 would not be finite.
EIGHT_BITS = StepWidth(8, np.float32(127), 0x7BFF)
FOUR_BITS = StepWidth(4, np.float32(7), 0x7DFF)


@dataclass(frozen=True)
class _Native:
    """`Loops` in C. If C refuses an input, the numpy reference gets it, and raises the error."""

    library: ctypes.CDLL
    width: StepWidth

    def encode(self, blocks: Blocks, minus: Blocks | None, bound: float) -> bytes:
        data, n, of = np.empty(len(blocks) * self.width.block_bytes, np.uint8), len(blocks), kernels.address
        less = None if minus is None else of(minus)
        if self.library.encode(of(blocks), less, n, self.width.bits, bound, of(data)):
            return self.width.encode(blocks, minus, bound)
        return data.tobytes()

    def decode(self, data: memoryview, num_blocks: int) -> Blocks:
        values = np.empty((num_blocks, BLOCK), np.float32)
        self._call(self.library.decode, data, num_blocks, kernels.address(values))
        return values

    def add(self, data: memoryview, num_blocks: int, share: np.float32, total: Blocks) -> None:
        self._call(self.library.add, data, num_blocks, float(share), kernels.address(total))

    def squares(self, data: memoryview, num_blocks: int) -> Norms:
        norms = np.empty(num_blocks, np.float64)
        self._call(self.library.squares, data, num_blocks, kernels.address(norms))
        return norms

    def _call(self, function: ctypes._NamedFuncPointer, data: memoryview, num_blocks: int, *args: float) -> None:
        coded = np.frombuffer(data, np.uint8)
        if function(kernels.address(coded), num_blocks, self.width.bits, *args):
            self.width.check(data, num_blocks)


def scale_values(bits: Scales) -> npt.NDArray[np.float32]:
    """(n,) bfloat16 patterns as float32: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scaled(name: str, width: StepWidth) -> Codec:
    def loops() -> Loops:
        library = kernels.library()
        return width if library is None else _Native(library, width)

    return Codec(
        name,
        per_block(width.block_bytes),
        lambda blocks: loops().encode(blocks, None, FLOAT_MAX),
        lambda data, num_blocks: loops().decode(data, num_blocks),
        width.check,
        lambda data, num_blocks: loops().squares(data, num_blocks),
        _add=lambda data, num_blocks, share, total: loops().add(data, num_blocks, share, total),
        _encode_difference=lambda one, other, bound: loops().encode(one, other, bound),
    )


INT8, INT4 = _scaled("int8", EIGHT_BITS), _scaled("int4", FOUR_BITS)
