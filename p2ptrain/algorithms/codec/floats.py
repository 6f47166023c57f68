"""Half and full precision."""

from __future__ import annotations

from functools import partial

import numpy as np

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec.base import Blocks, Codec, chunks, per_block
from p2ptrain.errors import WireError

_FP16_MAX = 65504.0


def _encode_fp16(blocks: Blocks) -> bytes:
    """Layout: n · 64 half-precision values, little-endian, rounded to nearest; beyond ±65504 they saturate."""
    _require_finite(blocks, ValueError)
    return np.clip(blocks, -_FP16_MAX, _FP16_MAX).astype("<f2").tobytes()


def _encode_none(blocks: Blocks) -> bytes:
    """Layout: n · 64 float32 values, little-endian."""
    _require_finite(blocks, ValueError)
    return blocks.astype("<f4").tobytes()


def _decode(dtype: str, data: memoryview, num_blocks: int) -> Blocks:
    blocks = np.frombuffer(data, dtype).reshape(num_blocks, BLOCK).astype(np.float32)
    _require_finite(blocks, WireError)
    return blocks


def _check_fp16(data: memoryview, num_blocks: int) -> None:
    # In half precision, infinities and NaN are those whose five exponent bits are all set.
    if np.any(np.frombuffer(data, "<u2") & np.uint16(0x7C00) == 0x7C00):
        raise WireError("a value is not finite")


def _check_none(data: memoryview, num_blocks: int) -> None:
    _require_finite(np.frombuffer(data, "<f4").reshape(num_blocks, BLOCK), WireError)


def _require_finite(blocks: Blocks, error: type[Exception]) -> None:
    for chunk in chunks(len(blocks)):
        if not np.isfinite(blocks[chunk]).all():
            raise error("a value is not finite")


FP16 = Codec("fp16", per_block(BLOCK * 2), _encode_fp16, partial(_decode, "<f2"), _check_fp16)
NONE = Codec("none", per_block(BLOCK * 4), _encode_none, partial(_decode, "<f4"), _check_none)
