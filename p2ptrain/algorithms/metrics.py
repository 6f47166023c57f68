"""Measures of how far apart peers are.

For weights: the SPARTA paper's correlation (A.3) and the variance across peers, on a sample. For outer gradients: the
cosine similarity and the norm that DiLoCo reports, from a (k, k) Gram matrix, which is the sum of those of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.algorithms.fragments import permute


def pairwise_correlation(vectors: npt.ArrayLike) -> float:
    """Average Pearson correlation over all pairs of peers (SPARTA, appendix A.3), in O(kn); 1 if all agree.

    `vectors`: (k, n) weights of k ≥ 2 peers at the same n positions. One whose weights are all equal has correlation 0
    with every other.
    """
    values = np.asarray(vectors, np.float64)
    peers = len(values)
    assert peers >= 2, "a correlation needs two peers"
    centred = values - values.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    units = np.divide(centred, norms, out=np.zeros_like(centred), where=norms > 0)
    # The sum of the inner products over all pairs, from the square of the sum.
    return float((np.square(units.sum(axis=0)).sum() - np.square(units).sum()) / (peers * (peers - 1)))


def disagreement(vectors: npt.ArrayLike) -> float:
    """Variance across peers, averaged over positions. `vectors`: (k, n) weights of k peers at the same positions."""
    return float(np.asarray(vectors, np.float64).var(axis=0).mean())


def sample_indices(seed: int, numel: int, count: int) -> npt.NDArray[np.int64]:
    """Return min(count, numel) distinct positions in [0, numel), sorted: int64, the same on every peer of a run."""
    return np.sort(permute(np.arange(min(count, numel)), numel, f"sample {seed}"))


def gram(vectors: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
    """Inner products of k vectors of one shape, (k, k). The sum over parts of the vectors is that of the whole.

    Stacks the vectors in double precision, so call it for one chunk of a round at a time.
    """
    stacked = np.stack([vector.reshape(-1) for vector in vectors]).astype(np.float64)
    return stacked @ stacked.T


def encoded_gram(encoded: Sequence[Encoded], codec: Codec, num_blocks: int, compared: int) -> npt.NDArray[np.float64]:
    """`gram` of the first `compared` blocks of encoded vectors of `num_blocks`. Raises WireError on bad bytes."""
    return gram([codec.decode(data, num_blocks)[:compared] for data in encoded])


def mean_cosine(products: npt.NDArray[np.float64]) -> float:
    """Average cosine similarity over all pairs of outer gradients (DiLoCo, figure 10), from their (k, k) `gram`.

    k ≥ 2. A vector of zeros has similarity 0 to every other.
    """
    peers = len(products)
    assert peers >= 2, "a similarity needs two peers"
    norms = np.sqrt(np.diagonal(products))
    scale = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    cosines = products * scale[:, None] * scale
    return float((cosines.sum() - np.trace(cosines)) / (peers * (peers - 1)))


def mean_norm(products: npt.NDArray[np.float64], weights: Sequence[float]) -> float:
    """Euclidean norm of the weighted mean outer gradient, from the (k, k) `gram` of the outer gradients.

    DiLoCo finds that it falls as 1/√k if shards differ (section 6.2): the outer gradients are nearly orthogonal then.
    `weights`: (k,) in the same order, not negative, not all zero.
    """
    shares = np.asarray(weights, np.float64) / math.fsum(weights)
    # Rounding may leave a sum a little below zero.
    return math.sqrt(max(0.0, float(shares @ products @ shares)))
