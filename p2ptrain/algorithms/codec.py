"""How blocks of 64 values become bytes: int8 with a scale per block, half or full precision.

Every codec has a fixed size per block and codes each block on its own, so that a slice of blocks can be coded,
sent and checked alone. Decoding is the same bits on every machine: integer conversions and single, separately rounded
float32 operations, of which IEEE 754 leaves no choice. That is what lets peers agree on a hash of the anchor.

int8 raw weights cost no loss in simulation (int4 does). The scale is a bfloat16, rounded *up* so that no value needs
more than 127 steps, and never subnormal, so that a CPU that flushes subnormals decodes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.indexspace import BLOCK
from p2ptrain.errors import ConfigError, WireError

Blocks = npt.NDArray[np.float32]

_INT8_MAX = np.float32(127)
_INF_BITS = np.uint32(0x7F80_0000)
# bfloat16 patterns: the smallest normal number, and the last below 2^121, from where -128 · scale is not finite.
_SCALE_MIN, _SCALE_MAX = 0x0080, 0x7BFF
_FP16_MAX = 65504.0
# 256 KiB of float32: what one step of a codec works on stays in a core's second-level cache.
_CHUNK_BLOCKS = 1024


@dataclass(frozen=True)
class Codec:
    """One way to code blocks.

    Attributes:
        name: as in `RunConfig.round_codec`.
        bytes_per_block: coded size of 64 values.
    """

    name: str
    bytes_per_block: int
    _encode: Callable[[Blocks], bytes]
    _decode: Callable[[memoryview, int], Blocks]

    def encode(self, blocks: Blocks) -> bytes:
        """Code (n, 64) float32 values, only read, into n · `bytes_per_block` bytes.

        Raises:
            ValueError: a value is not finite. Finite ones never raise: what a codec cannot hold saturates.
        """
        return self._encode(np.ascontiguousarray(blocks, np.float32).reshape(-1, BLOCK))

    def decode(self, data: bytes | memoryview, num_blocks: int) -> Blocks:
        """Return the (num_blocks, 64) float32 values in `data`: fresh, writable, finite, the same bits everywhere.

        Raises:
            WireError: the size is wrong, or a scale or value is not one that `encode` can make finite.
        """
        view = memoryview(data)
        if view.nbytes != num_blocks * self.bytes_per_block:
            raise WireError(
                f"{view.nbytes} bytes for {num_blocks} blocks in {self.name}: must be {self.bytes_per_block} each"
            )
        return self._decode(view, num_blocks)


def codec(name: str) -> Codec:
    """The codec called `name`: "int8", "fp16" or "none". Raises ConfigError for another name."""
    for candidate in (_INT8, _FP16, _NONE):
        if candidate.name == name:
            return candidate
    raise ConfigError(f"codec {name!r}: must be one of int8, fp16, none")


def _encode_int8(blocks: Blocks) -> bytes:
    """Layout: n scales (bfloat16, little-endian), then n · 64 int8 values; value = int8 · scale.

    Beyond ±3.36e38, which is 127 times the largest scale, values saturate.
    """
    data = np.empty(len(blocks) * (2 + BLOCK), np.uint8)
    scales = data[: 2 * len(blocks)].view("<u2")
    values = data[2 * len(blocks) :].view(np.int8).reshape(-1, BLOCK)
    for chunk in _chunks(len(blocks)):
        block = blocks[chunk]
        # The bit patterns of non-negative floats are in the order of the floats, with inf and nan above all.
        peaks = (block.view(np.uint32) & np.uint32(0x7FFF_FFFF)).max(axis=1)
        if np.any(peaks >= _INF_BITS):
            raise ValueError("a value is not finite")
        bits = ((peaks.view(np.float32) / _INT8_MAX).view(np.uint32) + np.uint32(0xFFFF)) >> 16
        scales[chunk] = np.where(peaks > 0, np.clip(bits, _SCALE_MIN, _SCALE_MAX), 0)
        scale = _scale_values(scales[chunk])
        steps = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None] * block
        np.rint(steps, out=steps)
        np.copyto(values[chunk], np.clip(steps, -_INT8_MAX, _INT8_MAX, out=steps), casting="unsafe")
    return data.tobytes()


def _decode_int8(data: memoryview, num_blocks: int) -> Blocks:
    scales = np.frombuffer(data, "<u2", num_blocks)
    if not np.all((scales == 0) | ((scales >= _SCALE_MIN) & (scales <= _SCALE_MAX))):
        raise WireError("an int8 scale is negative, subnormal, above 2^121 or not finite")
    values = np.frombuffer(data, np.int8, offset=2 * num_blocks).reshape(-1, BLOCK)
    return np.multiply(values, _scale_values(scales)[:, None], dtype=np.float32)


def _scale_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """(n,) bfloat16 patterns as float32: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _encode_fp16(blocks: Blocks) -> bytes:
    """Layout: n · 64 half-precision values, little-endian, rounded to nearest; beyond ±65504 they saturate."""
    _require_finite(blocks, ValueError)
    return np.clip(blocks, -_FP16_MAX, _FP16_MAX).astype("<f2").tobytes()


def _decode_fp16(data: memoryview, num_blocks: int) -> Blocks:
    blocks = np.frombuffer(data, "<f2").reshape(num_blocks, BLOCK).astype(np.float32)
    _require_finite(blocks, WireError)
    return blocks


def _encode_none(blocks: Blocks) -> bytes:
    """Layout: n · 64 float32 values, little-endian."""
    _require_finite(blocks, ValueError)
    return blocks.astype("<f4").tobytes()


def _decode_none(data: memoryview, num_blocks: int) -> Blocks:
    blocks = np.frombuffer(data, "<f4").reshape(num_blocks, BLOCK).astype(np.float32)
    _require_finite(blocks, WireError)
    return blocks


def _require_finite(blocks: Blocks, error: type[Exception]) -> None:
    for chunk in _chunks(len(blocks)):
        if not np.isfinite(blocks[chunk]).all():
            raise error("a value is not finite")


def _chunks(num_blocks: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK_BLOCKS) for start in range(0, num_blocks, _CHUNK_BLOCKS))


_INT8 = Codec("int8", BLOCK + 2, _encode_int8, _decode_int8)
_FP16 = Codec("fp16", BLOCK * 2, _encode_fp16, _decode_fp16)
_NONE = Codec("none", BLOCK * 4, _encode_none, _decode_none)
