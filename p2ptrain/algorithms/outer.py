"""The outer optimizer of DiLoCo: from encoded outer gradients to the next anchor.

Everything that decides the anchor's bits happens here and in `codec`. Members of a round must get the same bits on any
CPU, so the arithmetic is numpy float32 with every operation rounded on its own, in a fixed order. torch's own
`SGD(nesterov)`, `add(alpha=)` and `lerp` fuse operations depending on the vector unit and give different bits.
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

# 256 KiB of float32: the scratch of one chunk stays in a core's second-level cache.
_CHUNK = 65536
# Weights are token counts; above 2^53 floats do not count.
_MAX_WEIGHT = 2.0**53
# A fast peer counts at most twice the median, so that no single peer is the mean (DESIGN: "Speeds").
_TOKEN_CAP = 2
# Speeds within 10 % of the median are noise of the measurement: those peers keep H itself.
_SNAP = 0.1


def outer_step(anchor: Array, momentum: Array, mean_gradient: Array, lr: float, momentum_factor: float) -> None:
    """Move the anchor by one Nesterov step, in place (DiLoCo, Algorithm 1, line 14; torch's SGD(nesterov=True)).

    m = μ·m + g; A -= lr · (g + μ·m). The first step from m = 0 is thus lr · (1 + μ) · g: 1.33 g at 0.7 and 0.9.
    With μ = 0 it is A -= lr · g and the momentum is left alone; lr 1 then makes it a plain average (FedAvg).

    Args:
        anchor: contiguous float32 of any shape, changed in place.
        momentum: as `anchor`, changed in place.
        mean_gradient: as `anchor`, the mean of anchor - local; only read.
        lr: outer learning rate.
        momentum_factor: μ.
    """
    assert anchor.shape == momentum.shape == mean_gradient.shape
    assert anchor.flags.c_contiguous
    assert momentum.flags.c_contiguous
    lr32, factor32 = np.float32(lr), np.float32(momentum_factor)
    anchors, momenta, gradients = anchor.reshape(-1), momentum.reshape(-1), mean_gradient.reshape(-1)
    scratch = np.empty(min(_CHUNK, anchors.size), np.float32)
    for start in range(0, anchors.size, _CHUNK):
        a, m, g = (array[start : start + _CHUNK] for array in (anchors, momenta, gradients))
        update = scratch[: len(a)]
        if momentum_factor == 0:
            np.multiply(g, lr32, out=update)
        else:
            np.multiply(m, factor32, out=m)
            np.add(m, g, out=m)
            np.multiply(m, factor32, out=update)
            np.add(update, g, out=update)
            np.multiply(update, lr32, out=update)
        np.subtract(a, update, out=a)


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
    weights = [weight for _, weight in encoded]
    if not (all(0 <= weight <= _MAX_WEIGHT for weight in weights) and any(weights)):
        raise WireError(f"round weights {weights}: must be between 0 and 2^53, and not all zero")
    # fsum, as `sum` adds floats in another way from Python 3.12 on.
    total = math.fsum(weights)
    mean = np.zeros((num_blocks, BLOCK), np.float32)
    with np.errstate(over="ignore"):
        for data, weight in encoded:
            values = codec.decode(data, num_blocks)
            values *= np.float32(weight / total)
            mean += values
    if not np.isfinite(mean).all():
        raise WireError("the mean of the outer gradients is not finite")
    return mean


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


def scaled_interval(sync_every: int, speed: float, median_speed: float) -> int:
    """H_i, the inner steps a peer takes between rounds: H · speed / median, so that all arrive together.

    Args:
        sync_every: H of the run.
        speed, median_speed: inner steps per second of this peer and of the roster's median.

    Returns:
        At least 1; H itself when the speed is within 10 % of the median, or when a speed is not known (not a positive
        number).
    """
    ratio = speed / median_speed if median_speed > 0 else math.nan
    if not 0 < ratio < math.inf or abs(ratio - 1) <= _SNAP:
        return sync_every
    return max(1, round(sync_every * ratio))
