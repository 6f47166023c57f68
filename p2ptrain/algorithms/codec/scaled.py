"""int8 and int4 with a scale per 64 values.

The scale is a bfloat16, rounded *up* so that no value needs more than 127 (int4: 7) steps, and never subnormal, so that
a CPU that flushes subnormals decodes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec.base import Blocks, Codec, chunks, per_block
from p2ptrain.errors import WireError

Scales = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int8]
Pack = Callable[[Steps], npt.NDArray[np.uint8]]
Unpack = Callable[[npt.NDArray[np.uint8]], Steps]

SCALE_BYTES = 2
INF_BITS = np.uint32(0x7F80_0000)
# The bfloat16 pattern of the smallest normal number.
SCALE_MIN = 0x0080


@dataclass(frozen=True)
class StepWidth:
    """Symmetric integers of one width."""

    most: np.float32  # the largest step that encoding makes
    scale_max: int  # the last bfloat16 pattern with which the lowest step, -most - 1, is finite

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

    def check(self, scales: Scales) -> None:
        """Raises WireError on a scale that `quantise` does not make. Every step is possible."""
        if not np.all((scales == 0) | ((scales >= SCALE_MIN) & (scales <= self.scale_max))):
            raise WireError("a scale is negative, subnormal, too large or not finite")

    def dequantise(self, scales: Scales, steps: Steps) -> Blocks:
        """(n, 64) step · scale. Raises WireError on a scale that `quantise` does not make."""
        self.check(scales)
        return np.multiply(steps, scale_values(scales)[:, None], dtype=np.float32)


# -128 · 2^121 and -8 · 2^125 would not be finite.
EIGHT_BITS = StepWidth(np.float32(127), 0x7BFF)
FOUR_BITS = StepWidth(np.float32(7), 0x7DFF)


def scale_values(bits: Scales) -> npt.NDArray[np.float32]:
    """(n,) bfloat16 patterns as float32: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scaled(name: str, width: StepWidth, packed_bytes: int, pack: Pack, unpack: Unpack) -> Codec:
    """Layout: n scales (bfloat16, little-endian), then the packed steps of n blocks; value = step · scale.

    The native loops do what the numpy code after them does, with the same bits.
    """
    step_bits = 8 * packed_bytes // BLOCK

    def split(data: memoryview | npt.NDArray[np.uint8], num_blocks: int) -> tuple[Scales, npt.NDArray[np.uint8]]:
        packed = np.frombuffer(data, np.uint8, offset=SCALE_BYTES * num_blocks).reshape(-1, packed_bytes)
        return np.frombuffer(data, "<u2", num_blocks), packed

    def where(scales: Scales, packed: npt.NDArray[np.uint8]) -> tuple[int, int]:
        return kernels.address(scales), kernels.address(packed)

    def encode(blocks: Blocks) -> bytes:
        data = np.empty(len(blocks) * (SCALE_BYTES + packed_bytes), np.uint8)
        scales, packed = split(data, len(blocks))
        if (library := kernels.library()) is not None:
            most, scale_max = float(width.most), width.scale_max
            if library.encode(kernels.address(blocks), len(blocks), step_bits, most, scale_max, *where(scales, packed)):
                raise ValueError("a value is not finite")
            return data.tobytes()
        for chunk in chunks(len(blocks)):
            steps = np.empty((chunk.stop - chunk.start, BLOCK), np.int8)
            width.quantise(blocks[chunk], scales[chunk], steps)
            packed[chunk] = pack(steps)
        return data.tobytes()

    def decode(data: memoryview, num_blocks: int) -> Blocks:
        scales, packed = split(data, num_blocks)
        if (library := kernels.library()) is not None:
            width.check(scales)
            values = np.empty((num_blocks, BLOCK), np.float32)
            library.decode(*where(scales, packed), num_blocks, step_bits, kernels.address(values))
            return values
        return width.dequantise(scales, unpack(packed))

    def add(data: memoryview, num_blocks: int, share: np.float32, total: Blocks) -> None:
        scales, packed = split(data, num_blocks)
        if (library := kernels.library()) is not None:
            width.check(scales)
            into = kernels.address(total)
            library.add(*where(scales, packed), num_blocks, step_bits, float(share), into)
            return
        values = width.dequantise(scales, unpack(packed))
        values *= share
        total += values

    def squares(data: memoryview, num_blocks: int) -> npt.NDArray[np.float64]:
        """(n,) squared norms of the blocks, in half the time of decoding: the scale is taken out of the sum."""
        scales, packed = split(data, num_blocks)
        width.check(scales)
        if (library := kernels.library()) is not None:
            norms = np.empty(num_blocks, np.float64)
            library.squares(*where(scales, packed), num_blocks, step_bits, kernels.address(norms))
            return norms
        steps = unpack(packed).astype(np.float32)
        of_steps: npt.NDArray[np.float32] = np.einsum("ij,ij->i", steps, steps)
        return np.square(scale_values(scales).astype(np.float64)) * of_steps

    def check(data: memoryview, num_blocks: int) -> None:
        width.check(np.frombuffer(data, "<u2", num_blocks))

    return Codec(name, per_block(SCALE_BYTES + packed_bytes), encode, decode, check, squares, _add=add)


def _pack_halves(steps: Steps) -> npt.NDArray[np.uint8]:
    """Byte i of a block holds step i in its low half, step i + 32 in its high half."""
    halves = steps.view(np.uint8)
    return (halves[:, : BLOCK // 2] & np.uint8(15)) | (halves[:, BLOCK // 2 :] << np.uint8(4))


def _unpack_halves(packed: npt.NDArray[np.uint8]) -> Steps:
    # The shift to the right copies the sign.
    return np.hstack([(packed << 4).view(np.int8) >> 4, packed.view(np.int8) >> 4])


INT8 = _scaled("int8", EIGHT_BITS, BLOCK, lambda steps: steps.view(np.uint8), lambda packed: packed.view(np.int8))
INT4 = _scaled("int4", FOUR_BITS, BLOCK // 2, _pack_halves, _unpack_halves)
