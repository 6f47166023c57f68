"""The mean of encoded outer gradients: how a reducer combines them, and with what weights.

The mean determines the anchor bit for bit, so it is computed in numpy float32 with each operation rounded separately,
in the order of the contributors (see `outer`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.errors import WireError

Array = npt.NDArray[np.float32]

# Weights are token counts; floats above 2^53 do not represent every integer.
_MAX_WEIGHT = 2.0**53
# A fast peer weighs at most twice the median, so that no single peer dominates the mean.
_TOKEN_CAP = 2
# The largest difference of anchor and weights that takes part in a round. No training comes near it; the outer step's
# momentum, the anchor and the squares summed for the Gram matrix stay finite in float32 however many rounds it lasts.
MAX_GRADIENT = 1e12
# Encoding an outer gradient, and then their mean, rounds values up by a few percent at most.
MAX_MEAN = 2 * MAX_GRADIENT


def weighted_mean(encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int) -> Array:
    """Return the weighted mean: the sum of (w / W) · decode(bytes), added in the order given.

    Args:
        encoded: for each contributor, the encoded outer gradient of this part and its weight; at least one.
        codec: decodes them.
        num_blocks: blocks of the part.

    Returns:
        (num_blocks, 64) float32, a new array. The same bits on every machine for the same order.

    Raises:
        WireError: bytes do not decode, weights cannot be token counts, or the mean is not finite (the inputs were near
            the limits of float32). Every mean that is returned can be encoded.
    """
    mean = np.zeros((num_blocks, BLOCK), np.float32)
    with np.errstate(over="ignore"):
        for (data, _), share in zip(encoded, shares_of(encoded), strict=True):
            codec.add(data, num_blocks, share, mean)
    return finite(mean)


def disjoint_mean(encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int) -> Array:
    """Return, at each position, the mean of the values that have the majority sign (TIES: Yadav et al., 2023).

    The majority sign is that of the weighted sum. Values of the other sign, and zeros, are left out of the sum and of
    the divisor. Where neither sign outweighs the other the mean is zero. DiLoCo found it slightly worse than the plain
    mean (section 6.1, "Weighted Average of Outer Gradients").

    Arguments, result and errors are those of `weighted_mean`.
    """
    sign = np.sign(weighted_mean(encoded, codec, num_blocks))
    mean, divisor = (np.zeros((num_blocks, BLOCK), np.float32) for _ in range(2))
    with np.errstate(over="ignore"):
        for (data, _), share in zip(encoded, shares_of(encoded), strict=True):
            values = codec.decode(data, num_blocks)
            counted = np.multiply(values, sign) > 0
            shares = counted.astype(np.float32)
            shares *= share
            divisor += shares
            shares *= values
            mean += shares
        # Without any value, zero stays zero.
        mean /= np.where(divisor > 0, divisor, np.float32(1))
    return finite(mean)


def token_weights(tokens: Sequence[int]) -> list[float]:
    """Return the weights of outer gradients: each peer's tokens, capped at twice their median.

    Peers without tokens are left out of the median; if no peer has any, all weights are equal.

    `tokens`: for each contributor, those trained since the last round that included it; not negative. The weights are
    in the same order and not normalised; at least one is positive.
    """
    trained = [count for count in tokens if count > 0]
    if not trained:
        return [1.0] * len(tokens)
    cap = _TOKEN_CAP * statistics.median(trained)
    return [float(min(count, cap)) for count in tokens]


def shares_of(encoded: Sequence[tuple[Encoded, float]]) -> list[np.float32]:
    """Return w / W of each contributor. Raises WireError on weights that cannot be token counts."""
    weights = [weight for _, weight in encoded]
    if not (all(0 <= weight <= _MAX_WEIGHT for weight in weights) and any(weights)):
        raise WireError(f"round weights {weights}: must be between 0 and 2^53, and not all zero")
    # fsum: `sum` adds floats in another way from Python 3.12 on.
    total = math.fsum(weights)
    return [np.float32(weight / total) for weight in weights]


def finite(mean: Array) -> Array:
    """Return `mean` itself. Raises WireError unless it is finite."""
    if not np.isfinite(mean).all():
        raise WireError("the mean of the outer gradients is not finite")
    return mean
