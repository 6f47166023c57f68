"""NoLoCo's outer step between two peers: no round, no quorum; peers stay close, not equal.

Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models" (arXiv 2506.10911). With
anchor φ, weights θ, outer momentum m, and means over the two of a pair:

    m ← μ m + η mean(θ − φ) + η (mean(φ) − φ);  φ ← φ + m;  θ ← φ

The first term is DiLoCo's outer gradient with its sign changed, the second draws the two anchors together. The paper
gives the second term a factor γ of its own, and prints the first with a minus sign. The signs here, and γ = η, are
those of the authors' code. With one η the two terms are η (mean(θ) − φ), so a partner has to send only its θ: half of
the paper's bytes. Momentum is plain, not Nesterov's, in their code too.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def pairwise_step(
    anchor: Array, moment: Array, own: Array, partner: Array | None, *, lr: float, momentum: float
) -> None:
    """Take one step, in place: m ← μ m + η (mean(θ) − φ); φ ← φ + m. Elementwise, so chunks can be updated separately.

    Args:
        anchor: φ, float32 of any shape; changed in place.
        moment: m, of the same shape; changed in place.
        own: our θ; becomes φ′ − θ, the change that the weights make.
        partner: the partner's θ; None if we take the step alone, and overwritten otherwise.
        lr: η.
        momentum: μ, in [0, 1).
    """
    if partner is None:
        partner = own.copy()
    partner += own
    partner *= np.float32(0.5)
    partner -= anchor
    partner *= np.float32(lr)
    moment *= np.float32(momentum)
    moment += partner
    anchor += moment
    np.subtract(anchor, own, out=own)


def squared_distance(own: Array, partner: Array) -> float:
    """The squared Euclidean distance, in double precision."""
    difference = own.astype(np.float64)
    difference -= partner
    return float(np.vdot(difference, difference))


def spread(own: Array, partner: Array) -> float:
    """How far one peer's anchor is from the mean of all, estimated from two, relative to the rms of ours.

    The unbiased variance of two values is half of the square of their difference. 0 for equal anchors, 1 for unrelated
    ones of one size.
    """
    square = float(np.vdot(own, own))
    return math.sqrt(squared_distance(own, partner) / 2 / square) if square > 0 else 0.0
