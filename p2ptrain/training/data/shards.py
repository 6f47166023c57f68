"""Shards: the training text cut into blocks, and the blocks dealt to a fixed number of shards (DiLoCo, section 3).

A block is about 4,096 consecutive characters, regardless of files. Adjacent blocks of one shard form a span, and
windows are drawn within spans, so a window never holds a character of another shard.

A partition depends only on the length of the text and on numbers that all peers of a run share, so every peer computes
it locally. Two machines get the same shards if they have the same text. "stdlib" differs between versions of Python.
Peers that bring different files have shards of different texts, which may overlap.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.corpus import BLOCK_TOKENS

# Guess: large enough that weighting by size differs from a plain mean (with 8 shards the largest has 23 % of the text
# and the smallest 6 %), small enough that the smallest still has many windows.
LARGEST_TO_SMALLEST = 4.0
# Guess: with four windows per block, a block without neighbours in its shard still has three quarters of the possible
# windows.
WINDOWS_IN_BLOCK = 4
# Each start of k-means finds its own optimum; the best of ten rarely changes when the last bits of the features differ.
STARTS = 10


@dataclass(frozen=True)
class Shards:
    """A partition of the training text.

    Attributes:
        bounds: int64 (blocks + 1,), where blocks begin and the last one ends, in tokens.
        shard_of: int64 (blocks,), the shard number of each block.
        count: number of shards; each has at least one block.
    """

    bounds: NDArray[np.int64]
    shard_of: NDArray[np.int64]
    count: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each shard. DiLoCo weights the outer gradients of unequal shards by it (section 6.1)."""
        sizes = np.bincount(self.shard_of, weights=np.diff(self.bounds), minlength=self.count)
        return tuple(int(size) for size in sizes)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the partition; equal on two peers that have the same partition."""
        return hashlib.sha256(self.bounds.astype("<i8").tobytes() + self.shard_of.astype("<i8").tobytes()).hexdigest()

    def spans(self, shard: int) -> NDArray[np.int64]:
        """Begin and end in tokens, int64 (spans, 2), of the contiguous ranges of text of this shard."""
        ours = np.concatenate([[False], self.shard_of == shard, [False]])
        # The places where it changes are begins and ends in turn.
        return self.bounds[np.flatnonzero(ours[1:] != ours[:-1])].reshape(-1, 2)


def block_bounds(num_tokens: int, *, context: int) -> NDArray[np.int64]:
    """Cut a text into equal blocks of at least WINDOWS_IN_BLOCK windows of `context` tokens; the last one is longer.

    Returns int64 (blocks + 1,): where blocks begin and the last one ends.
    """
    length = max(BLOCK_TOKENS, WINDOWS_IN_BLOCK * context)
    blocks = max(1, num_tokens // length)
    return np.append(np.arange(blocks, dtype=np.int64) * length, num_tokens)


def iid_shards(bounds: NDArray[np.int64], num_shards: int, *, seed: int) -> Shards:
    """Deal the blocks at random (the paper's i.i.d. setting); sizes differ by at most one block.

    Raises ConfigError if there are fewer blocks than shards.
    """
    check_enough_blocks(bounds, num_shards)
    return _dealt(bounds, np.arange(len(bounds) - 1) % num_shards, num_shards, seed)


def unbalanced_shards(
    bounds: NDArray[np.int64], num_shards: int, *, seed: int, largest_to_smallest: float = LARGEST_TO_SMALLEST
) -> Shards:
    """Deal the blocks at random, with sizes in geometric proportion; shard 0 is the largest.

    The sizes differ as those of clusters do, but the contents do not, so the two effects can be measured separately.
    DiLoCo's appendix calls the imbalance of clusters "quite balanced" at k = 4 and "striking" at k = 64, and therefore
    weights by size.

    Raises ConfigError if the smallest shard would have no block.
    """
    check_enough_blocks(bounds, num_shards)
    blocks = len(bounds) - 1
    shares = largest_to_smallest ** -(np.arange(num_shards) / max(1, num_shards - 1))
    shares /= shares.sum()
    ends = np.floor(np.cumsum(shares) * blocks + 0.5).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    if counts.min() < 1:
        raise ConfigError(
            f"num_shards = {num_shards}: the text has {blocks} blocks, and unbalanced shards need "
            f"{math.ceil(1 / shares.min())}, so that the smallest has one; give more text, or fewer shards"
        )
    return _dealt(bounds, np.repeat(np.arange(num_shards), counts), num_shards, seed)


def clustered_shards(
    bounds: NDArray[np.int64], features: NDArray[np.floating], num_shards: int, *, seed: int
) -> Shards:
    """Make one shard from each cluster of blocks, by k-means on their features. Their sizes may differ much.

    This is DiLoCo's non-i.i.d. setting (section 3.1), after Gururangan et al., "Scaling Expert Language Models with
    Unsupervised Domain Discovery", 2023.

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


def check_enough_blocks(bounds: NDArray[np.int64], num_shards: int) -> None:
    """Raise ConfigError if there are fewer blocks than shards."""
    blocks = len(bounds) - 1
    if not 1 <= num_shards <= blocks:
        raise ConfigError(
            f"num_shards = {num_shards}: must be between 1 and the number of blocks of the text, {blocks} of "
            f"{bounds[-1] // blocks} characters; give more text, or fewer shards"
        )


def _dealt(bounds: NDArray[np.int64], shards: NDArray[np.int64], num_shards: int, seed: int) -> Shards:
    """Assign the n-th block of a random order to the n-th entry of `shards`."""
    # Order by hash: numpy's permutation may differ between its versions.
    keys = [hashlib.sha256(f"{seed}/block {number}".encode()).digest() for number in range(len(bounds) - 1)]
    shard_of = np.empty(len(keys), dtype=np.int64)
    shard_of[sorted(range(len(keys)), key=keys.__getitem__)] = shards
    return Shards(bounds, shard_of, num_shards)
