"""int8 and int4 with a scale per 64 values.

The scale is a bfloat16, rounded *up* so that no value needs more than 127 (int4: 7) steps, and never subnormal, so that
a CPU that flushes subnormals decodes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.codec.base import Blocks, Codec, chunks, per_block
from p2ptrain.algorithms.indexspace import BLOCK
from p2ptrain.errors import WireError

Scales = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int8]

SCALE_BYTES = 2
INF_BITS = np.uint32(0x7F80_0000)
# The bfloat16 pattern of the smallest normal number.
_SCALE_MIN = 0x0080


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
        if np.any(peaks >= INF_BITS):
            raise ValueError("a value is not finite")
        bits = ((peaks.view(np.float32) / self.most).view(np.uint32) + np.uint32(0xFFFF)) >> 16
        scales[:] = np.where(peaks > 0, np.clip(bits, _SCALE_MIN, self.scale_max), 0)
        scale = _scale_values(scales)
        exact = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None] * blocks
        np.rint(exact, out=exact)
        np.copyto(steps, np.clip(exact, -self.most, self.most, out=exact), casting="unsafe")

    def check(self, scales: Scales) -> None:
        """Raises WireError on a scale that `quantise` does not make. Every step is possible."""
        if not np.all((scales == 0) | ((scales >= _SCALE_MIN) & (scales <= self.scale_max))):
            raise WireError("a scale is negative, subnormal, too large or not finite")

    def dequantise(self, scales: Scales, steps: Steps) -> Blocks:
        """(n, 64) step · scale. Raises WireError on a scale that `quantise` does not make."""
        self.check(scales)
        return np.multiply(steps, _scale_values(scales)[:, None], dtype=np.float32)


# -128 · 2^121 and -8 · 2^125 would not be finite.
EIGHT_BITS = StepWidth(np.float32(127), 0x7BFF)
FOUR_BITS = StepWidth(np.float32(7), 0x7DFF)


def _scale_values(bits: Scales) -> npt.NDArray[np.float32]:
    """(n,) bfloat16 patterns as float32: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _encode_int8(blocks: Blocks) -> bytes:
    """Layout: n scales (bfloat16, little-endian), then n · 64 int8 steps; value = step · scale."""
    data = np.empty(len(blocks) * (SCALE_BYTES + BLOCK), np.uint8)
    scales = data[: SCALE_BYTES * len(blocks)].view("<u2")
    steps = data[SCALE_BYTES * len(blocks) :].view(np.int8).reshape(-1, BLOCK)
    for chunk in chunks(len(blocks)):
        EIGHT_BITS.quantise(blocks[chunk], scales[chunk], steps[chunk])
    return data.tobytes()


def _decode_int8(data: memoryview, num_blocks: int) -> Blocks:
    scales = np.frombuffer(data, "<u2", num_blocks)
    steps = np.frombuffer(data, np.int8, offset=SCALE_BYTES * num_blocks).reshape(-1, BLOCK)
    return EIGHT_BITS.dequantise(scales, steps)


def _encode_int4(blocks: Blocks) -> bytes:
    """Layout: n scales, then 32 bytes a block: byte i holds step i in its low half, step i + 32 in its high half."""
    data = np.empty(len(blocks) * (SCALE_BYTES + BLOCK // 2), np.uint8)
    scales = data[: SCALE_BYTES * len(blocks)].view("<u2")
    packed = data[SCALE_BYTES * len(blocks) :].reshape(-1, BLOCK // 2)
    for chunk in chunks(len(blocks)):
        steps = np.empty((chunk.stop - chunk.start, BLOCK), np.int8)
        FOUR_BITS.quantise(blocks[chunk], scales[chunk], steps)
        halves = steps.view(np.uint8)
        packed[chunk] = (halves[:, : BLOCK // 2] & 15) | (halves[:, BLOCK // 2 :] << 4)
    return data.tobytes()


def _decode_int4(data: memoryview, num_blocks: int) -> Blocks:
    packed = np.frombuffer(data, np.uint8, offset=SCALE_BYTES * num_blocks).reshape(-1, BLOCK // 2)
    steps = np.empty((num_blocks, BLOCK), np.int8)
    # The shift to the right copies the sign.
    np.right_shift((packed << 4).view(np.int8), 4, out=steps[:, : BLOCK // 2])
    np.right_shift(packed.view(np.int8), 4, out=steps[:, BLOCK // 2 :])
    return FOUR_BITS.dequantise(np.frombuffer(data, "<u2", num_blocks), steps)


def _check(width: StepWidth, data: memoryview, num_blocks: int) -> None:
    width.check(np.frombuffer(data, "<u2", num_blocks))


INT8 = Codec("int8", per_block(SCALE_BYTES + BLOCK), _encode_int8, _decode_int8, partial(_check, EIGHT_BITS))
INT4 = Codec("int4", per_block(SCALE_BYTES + BLOCK // 2), _encode_int4, _decode_int4, partial(_check, FOUR_BITS))
