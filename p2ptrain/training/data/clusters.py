"""Shards that differ in content: k-means on features of the text's blocks (DiLoCo, section 3.1, non-i.i.d. setting,
after Gururangan et al., "Scaling Expert Language Models with Unsupervised Domain Discovery", 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.shards import Shards, check_enough_blocks

# Each start finds its own optimum; the best of ten rarely changes when the last bits of the features differ.
STARTS = 10


def clustered_shards(
    bounds: NDArray[np.int64], features: NDArray[np.floating], num_shards: int, *, seed: int
) -> Shards:
    """Make one shard from each cluster of blocks. Their sizes may differ much.

    The same features give the same shards on any machine with the same version of scikit-learn. If features differ in
    their last bits, as on two kinds of processor, a few blocks that lie between two clusters may change their shard;
    compare `Shards.digest`.

    Args:
        bounds: int64 (blocks + 1,), from `block_bounds`.
        features: (blocks, any number), finite.
        num_shards: number of clusters.
        seed: seeds the initial centres.

    Raises:
        ConfigError: there are fewer blocks than shards, or fewer different ones.
    """
    check_enough_blocks(bounds, num_shards)
    assert len(features) == len(bounds) - 1
    # Imported here because it takes a second.
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    distinct = len(np.unique(features, axis=0))
    if distinct < num_shards:
        raise ConfigError(
            f"num_shards = {num_shards}: the text has only {distinct} different blocks to make clusters of; "
            f"give more text, or fewer shards"
        )
    with threadpool_limits(limits=1):  # several threads would add numbers in any order
        kmeans = KMeans(num_shards, n_init=STARTS, random_state=seed % 2**32)
        clusters = kmeans.fit_predict(features.astype(np.float64))
    # k-means numbers its clusters at random. Renumber: shard 0 is that of the first block, 1 the next to appear, …
    found, first = np.unique(clusters, return_index=True)
    assert len(found) == num_shards
    names = np.empty(num_shards, dtype=np.int64)
    names[np.argsort(first)] = np.arange(num_shards)
    return Shards(bounds, names[clusters], num_shards)
