"""From encoded outer gradients to their mean: whom a reducer averages, with what weights, and how.

The mean decides the anchor's bits, so it is numpy float32 with every operation rounded on its own, in the order of the
contributors (see `outer`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.codec import Codec
from p2ptrain.algorithms.indexspace import BLOCK
from p2ptrain.errors import WireError

Array = npt.NDArray[np.float32]

# Weights are token counts; above 2^53 floats do not count.
_MAX_WEIGHT = 2.0**53
# A fast peer counts at most twice the median, so that no single peer is the mean (DESIGN: "Speeds").
_TOKEN_CAP = 2


def weighted_mean(encoded: Sequence[tuple[bytes, float]], codec: Codec, num_blocks: int) -> Array:
    """The mean that a reducer computes: sum of (w / W) · decode(bytes), in the order given.

    Args:
        encoded: for each contributor its coded outer gradient of this part and its weight; at least one.
        codec: how they are coded.
        num_blocks: blocks of the part.

    Returns:
        (num_blocks, 64) float32, fresh. The same bits on every machine for the same order.

    Raises:
        WireError: bytes that do not decode, weights that cannot be token counts, or a mean that is not finite (values
            at the end of float32, which no training sends); so every mean that is returned can be encoded.
    """
    mean = np.zeros((num_blocks, BLOCK), np.float32)
    with np.errstate(over="ignore"):
        for (data, _), share in zip(encoded, _shares(encoded), strict=True):
            values = codec.decode(data, num_blocks)
            values *= share
            mean += values
    return _finite(mean)


def disjoint_mean(encoded: Sequence[tuple[bytes, float]], codec: Codec, num_blocks: int) -> Array:
    """At each place, the mean of the outer gradients whose sign carries more weight there (TIES: Yadav et al., 2023).

    The sign elected is that of the weighted sum; those of the other sign, and zeros, do not count, in the divisor
    either. Where neither sign outweighs the other the mean is zero. DiLoCo found it slightly worse than the plain mean
    (section 6.1, "Weighted Average of Outer Gradients").

    Arguments, result and errors are those of `weighted_mean`.
    """
    sign = np.sign(weighted_mean(encoded, codec, num_blocks))
    mean, divisor = (np.zeros((num_blocks, BLOCK), np.float32) for _ in range(2))
    with np.errstate(over="ignore"):
        for (data, _), share in zip(encoded, _shares(encoded), strict=True):
            values = codec.decode(data, num_blocks)
            counted = np.multiply(values, sign) > 0
            shares = counted.astype(np.float32)
            shares *= share
            divisor += shares
            shares *= values
            mean += shares
        # Where nobody counts, zero stays zero.
        mean /= np.where(divisor > 0, divisor, np.float32(1))
    return _finite(mean)


def token_weights(tokens: Sequence[int]) -> list[float]:
    """Weights of outer gradients: tokens since each peer's last inclusion, at most twice their median.

    Measured with unequal speeds: 2.341 → 2.300 for DiLoCo, 2.286 → 2.268 with gossip. Peers that trained nothing do
    not count in the median; if nobody trained, all weigh the same.

    Args:
        tokens: for each contributor, not negative.

    Returns:
        Unnormalised weights in the same order; at least one is positive.
    """
    trained = [count for count in tokens if count > 0]
    if not trained:
        return [1.0] * len(tokens)
    cap = _TOKEN_CAP * statistics.median(trained)
    return [float(min(count, cap)) for count in tokens]


def _shares(encoded: Sequence[tuple[bytes, float]]) -> list[np.float32]:
    """w / W of each contributor. Raises WireError on weights that cannot be token counts."""
    weights = [weight for _, weight in encoded]
    if not (all(0 <= weight <= _MAX_WEIGHT for weight in weights) and any(weights)):
        raise WireError(f"round weights {weights}: must be between 0 and 2^53, and not all zero")
    # fsum, as `sum` adds floats in another way from Python 3.12 on.
    total = math.fsum(weights)
    return [np.float32(weight / total) for weight in weights]


def _finite(mean: Array) -> Array:
    if not np.isfinite(mean).all():
        raise WireError("the mean of the outer gradients is not finite")
    return mean
