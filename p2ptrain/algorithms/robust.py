"""Robust means of encoded outer gradients: some contributors may send anything, and the mean stays near the others'.

Each chunk of a round is averaged alone, as is each part of ButterflyClip (BTARD: Gorbunov et al., 2022). So the
bits do not depend on the plan of an attempt, on who reduces, or on the past, and any peer can compute them again.
A bound that holds for every chunk holds for the whole vector: the squares of its chunks' distances add up.

All three need a majority: with k contributors they say nothing once half of them lie together, and a peer that joins
under several identities counts several times. Of two contributors none can be told from a liar: all three are then the
weighted mean. None of them notices values that honest training could have sent.
Without any attacker they cost a little loss, as an honest peer that differs from the others counts less than it should.

Memory: the decoded chunk of every contributor and its ranks, k · 384 KiB, four times that of a large model. Time with 8
contributors on one core (measured): 11 (trimmed) to 18 ns for each value and contributor; 1.4 for the weighted mean.

As in `averaging`, every operation is rounded separately, and sums have a fixed order: no BLAS, and no `numpy.sum`,
whose order depends on the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.averaging import finite, shares_of
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import Codec, Encoded

Array = npt.NDArray[np.float32]

# Share of the values that `trimmed_mean` drops at each end: two liars of eight.
_TRIMMED = 0.25
# CenteredClip and Weiszfeld begin at the median, which is near already: three are enough (RFA, section 5). CenteredClip
# from zero gave losses no further apart than those of two seeds, with and without liars (measured).
_ITERATIONS = 3
# Smoothing of Weiszfeld's weights as a share of the median distance (RFA: an absolute 1e-6).
_SMOOTHING = 1e-6


def clipped_mean(encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int) -> Array:
    """Return CenteredClip (Karimireddy et al., 2021): v ← v + Σ wᵢ (xᵢ − v) · min(1, τ / ‖xᵢ − v‖), three times.

    τ is the median distance from v, and v begins at the coordinate-wise median. (ButterflyClip begins at the last mean;
    a new member does not have it.)

    Guarantee: with fewer than half of the contributors lying, v begins between honest values, τ is at most the largest
    distance of an honest contributor, and a liar of weight w moves v by at most w · τ in an iteration. It ends at half:
    the median, τ and the result are then the liars'. Without liars, contributors beyond the median distance are scaled
    down to it.

    Arguments, result and errors are those of `weighted_mean`; one chunk at most.
    """
    values, shares = _decoded(encoded, codec, num_blocks)
    if len(values) < 3:
        return finite(_trimmed(values, shares, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        mean = _median(values)
        for _ in range(_ITERATIONS):
            distances = [_norm(one - mean) for one in values]
            limit = statistics.median_low(distances)
            step = np.zeros_like(mean)
            for one, share, distance in zip(values, shares, distances, strict=True):
                difference = one - mean
                difference *= share if distance <= limit else np.float32(float(share) * (limit / distance))
                step += difference
            mean += step
    return finite(mean)


def trimmed_mean(encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int) -> Array:
    """Return, at each position, the weighted mean without the largest and the smallest quarter (Yin et al., 2018).

    Of k values, b = ⌊k / 4⌋ are dropped at each end, one at least if k is 3 or more. Contributors count once in the
    order, and with their weights in the mean of the rest.

    Guarantee: with at most b liars, every value of the mean lies between two honest values. It ends at b + 1, where the
    liars choose one of the values that count. Without liars it discards half of the values, so the
    mean has more noise; a value that only few contributors have is lost.

    Arguments, result and errors are those of `weighted_mean`; one chunk at most.
    """
    values, shares = _decoded(encoded, codec, num_blocks)
    return finite(_trimmed(values, shares, num_trimmed(len(values))))


def geometric_median(encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int) -> Array:
    """Return the point with the least weighted sum of distances, by smoothed Weiszfeld (RFA: Pillutla et al., 2022).

    v ← Σ βᵢ xᵢ / Σ βᵢ with βᵢ = wᵢ / max(ν, ‖xᵢ − v‖), three times from the coordinate-wise median.

    Guarantee: with liars of a share α of the weight, the exact point is at most 2 (1 − α) / (1 − 2α) times the largest
    honest distance away from the honest mean (RFA, section 4), and a liar counts less the farther away it is. It ends
    at half of the weight, and its start at half of the contributors. Without liars it counts those in the middle more:
    the noise of the mean hardly changes, but peers with data of their own are heard less.

    Arguments, result and errors are those of `weighted_mean`; one chunk at most.
    """
    values, shares = _decoded(encoded, codec, num_blocks)
    if len(values) < 3:
        return finite(_trimmed(values, shares, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        mean = _median(values)
        for _ in range(_ITERATIONS):
            distances = [_norm(one - mean) for one in values]
            least = _SMOOTHING * statistics.median_low(distances)
            if least == 0:  # most of them are equal: that is the point
                break
            inverse = [float(share) / max(least, distance) for share, distance in zip(shares, distances, strict=True)]
            total = math.fsum(inverse)
            mean = np.zeros_like(mean)
            for one, weight in zip(values, inverse, strict=True):
                mean += one * np.float32(weight / total)
    return finite(mean)


def num_trimmed(contributors: int) -> int:
    """The values that `trimmed_mean` drops at each end, which is the number of liars that it bears."""
    return max(int(_TRIMMED * contributors), 1 if contributors > 2 else 0)


def _median(values: Sequence[Array]) -> Array:
    """The coordinate-wise median. The halves keep the sum of two within float32."""
    return _trimmed(values, [np.float32(0.5)] * len(values), (len(values) - 1) // 2)


def _decoded(
    encoded: Sequence[tuple[Encoded, float]], codec: Codec, num_blocks: int
) -> tuple[list[Array], list[np.float32]]:
    """Values and shares of the contributors that have a weight. All are decoded, so that malformed bytes are found."""
    shares = shares_of(encoded)
    values = [codec.decode(data, num_blocks) for data, _ in encoded]
    weighted = [i for i, share in enumerate(shares) if share > 0]
    return [values[i] for i in weighted], [shares[i] for i in weighted]


def _trimmed(values: Sequence[Array], shares: Sequence[np.float32], dropped: int) -> Array:
    """The weighted mean at each position without the `dropped` largest and smallest values; equal ones in order."""
    count = len(values)
    ranks = [np.zeros(values[0].shape, np.int16) for _ in values]
    if dropped:
        for i in range(count):
            for j in range(i):
                above = values[j] <= values[i]
                ranks[i] += above
                ranks[j] += ~above
    mean, divisor = (np.zeros((len(values[0]), BLOCK), np.float32) for _ in range(2))
    with np.errstate(over="ignore", invalid="ignore"):
        for one, share, rank in zip(values, shares, ranks, strict=True):
            counted = np.multiply((rank >= dropped) & (rank < count - dropped), share, dtype=np.float32)
            divisor += counted
            counted *= one
            mean += counted
        mean /= divisor
    return mean


def _norm(values: Array) -> float:
    """Euclidean norm, the same bits on every machine: squares in float64, added by halves."""
    squares = values.reshape(-1).astype(np.float64)
    squares *= squares
    while len(squares) > 1:
        half, odd = divmod(len(squares), 2)
        squares[:half] += squares[half : 2 * half]
        if odd:
            squares[0] += squares[-1]
        squares = squares[:half]
    return math.sqrt(float(squares[0]))
