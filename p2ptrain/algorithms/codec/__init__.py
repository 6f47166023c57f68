"""Codecs from blocks of 64 values to bytes: quantised with a scale per block, half or full precision, pruned, sparse.

Decoding gives the same bits on every machine: it uses integer conversions and separately rounded float32 operations
only, whose results IEEE 754 defines. So peers can compare a hash of the anchor. The size depends only on the number of
blocks, so bytes of the wrong length are refused before they are decoded.

Raw weights are sent as int8 or with more precision: int8 did not change the loss in simulation, int4 cost 0.04 nats.
Stronger quantisation, pruning and sparsity are for outer gradients only. The coarsest ones, int2 and topk, have an
`error_decay`.
"""

from __future__ import annotations

from p2ptrain.algorithms.codec.base import CHUNK_BLOCKS, Codec, Encoded, difference, is_within
from p2ptrain.algorithms.codec.floats import FP16, NONE
from p2ptrain.algorithms.codec.pruned import pruned_int8
from p2ptrain.algorithms.codec.scaled import INT4, INT8
from p2ptrain.algorithms.codec.ternary import INT2
from p2ptrain.algorithms.codec.topk import DENSITY, topk
from p2ptrain.errors import ConfigError

__all__ = ["CHUNK_BLOCKS", "CODECS", "Codec", "Encoded", "codec", "difference", "is_within"]

_FIXED = {fixed.name: fixed for fixed in (INT8, INT4, INT2, FP16, NONE)}
CODECS = (*_FIXED, "topk")


def codec(name: str, *, prune_fraction: float = 0.0, density: float = DENSITY) -> Codec:
    """Return the codec called `name`, one of `CODECS`. Raises ConfigError if there is none, or it cannot prune.

    Args:
        prune_fraction: share of each block that "int8" leaves out; the other codecs cannot prune.
        density: share of the values that "topk" keeps; the other codecs keep all.
    """
    if name not in CODECS:
        raise ConfigError(f"codec {name!r}: must be one of {', '.join(CODECS)}")
    if prune_fraction:
        if name != "int8":
            raise ConfigError(f"codec {name!r} cannot prune: prune_fraction = {prune_fraction:g} needs int8")
        return pruned_int8(prune_fraction)
    return topk(density) if name == "topk" else _FIXED[name]
