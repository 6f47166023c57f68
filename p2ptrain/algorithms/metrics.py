"""How far apart peers are.

Their weights: the SPARTA paper's correlation (A.3) and a variance, on a sample. Their outer gradients: what DiLoCo
reports of them, from a (k, k) Gram matrix that reducers of parts can each compute for theirs and add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.codec import Codec
from p2ptrain.algorithms.fragments import permute


def pairwise_correlation(vectors: npt.ArrayLike) -> float:
    """Average Pearson correlation over all pairs of peers (SPARTA, appendix A.3), in O(kn).

    Args:
        vectors: (k, n) weights of k ≥ 2 peers at the same n places.

    Returns:
        1 when all peers agree; a peer whose weights are all equal correlates with none.
    """
    values = np.asarray(vectors, np.float64)
    peers = len(values)
    assert peers >= 2, "a correlation needs two peers"
    centred = values - values.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    units = np.divide(centred, norms, out=np.zeros_like(centred), where=norms > 0)
    # The sum over all pairs of inner products, from the square of the sum.
    return float((np.square(units.sum(axis=0)).sum() - np.square(units).sum()) / (peers * (peers - 1)))


def disagreement(vectors: npt.ArrayLike) -> float:
    """Variance across peers, averaged over places. `vectors`: (k, n) weights of k peers at the same n places."""
    return float(np.asarray(vectors, np.float64).var(axis=0).mean())


def sample_indices(seed: int, numel: int, count: int) -> npt.NDArray[np.int64]:
    """Sorted distinct places in [0, numel), `count` or all of them: the same on every peer of a run."""
    return np.sort(permute(np.arange(min(count, numel)), numel, f"sample {seed}"))


def gram(vectors: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
    """Inner products of k vectors of one shape, (k, k). Those of parts add up to those of the whole.

    One chunk of a round at a time: the vectors are stacked in double precision.
    """
    stacked = np.stack([vector.reshape(-1) for vector in vectors]).astype(np.float64)
    return stacked @ stacked.T


def encoded_gram(encoded: Sequence[bytes], codec: Codec, num_blocks: int, compared: int) -> npt.NDArray[np.float64]:
    """`gram` of the first `compared` blocks of coded vectors of `num_blocks`. Raises WireError on undecodable bytes."""
    return gram([codec.decode(data, num_blocks)[:compared] for data in encoded])


def mean_cosine(products: npt.NDArray[np.float64]) -> float:
    """Average cosine similarity over all pairs of outer gradients (DiLoCo, figure 10), from their (k, k) `gram`.

    k ≥ 2. A vector of zeros is similar to none.
    """
    peers = len(products)
    assert peers >= 2, "a similarity needs two peers"
    norms = np.sqrt(np.diagonal(products))
    scale = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    cosines = products * scale[:, None] * scale
    return float((cosines.sum() - np.trace(cosines)) / (peers * (peers - 1)))


def mean_norm(products: npt.NDArray[np.float64], weights: Sequence[float]) -> float:
    """Euclidean norm of the weighted mean outer gradient, from the (k, k) `gram` of the outer gradients.

    DiLoCo finds it to fall as 1/√k when shards differ (section 6.2): they are nearly orthogonal then.

    Args:
        products: as `gram` gives them.
        weights: (k,) in the same order, not negative, not all zero.
    """
    shares = np.asarray(weights, np.float64) / math.fsum(weights)
    # Rounding may leave a sum that cancels a little below zero.
    return math.sqrt(max(0.0, float(shares @ products @ shares)))
