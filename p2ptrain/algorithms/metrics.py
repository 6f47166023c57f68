"""How far apart the peers' weights are: the SPARTA paper's correlation (A.3) and a variance, on a sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
