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
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.codec import Codec
from p2ptrain.algorithms.codec.base import chunks

Array = npt.NDArray[np.float32]

# Same factor as the norm limit of an outer gradient in a round (guess).
MOST_TIMES = 3.0
# Blocks of the sample that two peers compare their anchors by: 1024 values (guess).
SAMPLE_BLOCKS = 16
# An anchor is refused if its distance from the median exceeds this share of the median's norm. Zeros are at 1.0, a
# flipped sign at 2.0, honest anchors below 0.3 (measured).
MOST_APART = 0.99


def pairwise_step(
    anchor: Array, moment: Array, own: Array, partner: Array | None, *, lr: float, momentum: float, scale: float = 1.0
) -> None:
    """Take one step, in place: m ← μ m + η (mean(θ) − φ); φ ← φ + m. Elementwise, and chunk by chunk without copies.

    Args:
        anchor: φ, float32 of any shape; changed in place.
        moment: m, of the same shape; changed in place.
        own: our θ; becomes φ′ − θ, the change that the weights make.
        partner: the partner's θ; None if we take the step alone, and overwritten otherwise.
        lr: η.
        momentum: μ, in [0, 1).
        scale: of the partner's difference from φ (see `clip_scale`).
    """
    rate, friction, factor = np.float32(lr), np.float32(momentum), np.float32(scale)
    for rows in chunks(len(own)):
        phi, m, theta = anchor[rows], moment[rows], own[rows]
        theta -= phi
        if partner is None:
            update = theta * rate
        else:
            update = partner[rows]
            update -= phi
            update *= factor
            update += theta
            update *= np.float32(0.5)
            update *= rate
        m *= friction
        m += update
        # φ + m − θ, without rounding to the size of φ in between.
        np.subtract(m, theta, out=theta)
        phi += m


def clip_scale(own: float, before: Sequence[float], partner: float) -> float:
    """The factor by which to scale a partner's difference from our anchor, so that one liar does not move us far.

    Self-centred clipping (He, Karimireddy and Jaggi, 2022). The limit is `MOST_TIMES` × the larger of ours and
    the median of the last partners'. Ours alone falls with the learning rate, while anchors stay apart. An honest
    partner that is far brings us nearer all the same; refusing it would keep the two apart for ever.

    Args:
        own: the Euclidean norm of θ − φ, both ours.
        before: the norms of the last partners' θ − our φ, one for each partner, after scaling.
        partner: the norm of this partner's θ − our φ.
    """
    usual = max(own, statistics.median_low(before) if before else 0.0)
    return min(1.0, MOST_TIMES * usual / partner) if partner > 0 else 1.0


def is_usual(sample: Array, others: Sequence[Array]) -> bool:
    """Whether a sample of an anchor is near the elementwise median of all samples, of which a minority may be lies."""
    median = np.median([sample, *others], axis=0).astype(np.float32)
    return squared_distance(median, sample) <= MOST_APART**2 * float(np.vdot(median, median))


def squared_distance(own: Array, partner: Array) -> float:
    """The squared Euclidean distance, in double precision; chunk by chunk, without copies of the whole."""
    square = 0.0
    for rows in chunks(len(own)):
        difference = own[rows].astype(np.float64)
        difference -= partner[rows]
        square += float(np.vdot(difference, difference))
    return square


def spread(own: Array, partner: Array) -> float:
    """The distance of a peer's anchor from the mean of all, estimated from two anchors, relative to the rms of ours.

    The unbiased variance of two values is half of the square of their difference. 0 for equal anchors, 1 for unrelated
    ones of one size.
    """
    square = float(np.vdot(own, own))
    return math.sqrt(squared_distance(own, partner) / 2 / square) if square > 0 else 0.0


def swap_bytes(codec: Codec, num_blocks: int) -> int:
    """The bytes that each of two partners sends in one step, without frames."""
    return codec.size_bytes(num_blocks) + codec.size_bytes(len(sample_blocks(num_blocks)))


def sample_blocks(num_blocks: int) -> npt.NDArray[np.int64]:
    """The blocks, spread evenly, by which anchors are compared."""
    return np.unique(np.linspace(0, num_blocks - 1, min(SAMPLE_BLOCKS, num_blocks)).astype(np.int64))
