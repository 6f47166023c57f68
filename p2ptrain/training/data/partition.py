"""A partition of the training text: cut into blocks, which are dealt to a fixed number of shares (DiLoCo, section 3).

Each peer trains on one share. Flags and messages call it a shard, as DiLoCo does; here a shard is a file of tokens.

A block is about 4,096 consecutive characters, regardless of files. Adjacent blocks of one share form a span, and
windows are drawn within spans, so a window never holds a character of another share.

A partition depends only on the length of the text and on numbers that all peers of a run share, so every peer computes
it locally. Two machines get the same shares if they have the same text. "stdlib" differs between versions of Python.
Peers that bring different files have shares of different texts, which may overlap.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.corpus import BLOCK_TOKENS

# Guess: large enough that weighting by size differs from a plain mean (with 8 shares the largest has 23 % of the text
# and the smallest 6 %), small enough that the smallest still has many windows.
LARGEST_TO_SMALLEST = 4.0
# Guess: with four windows per block, a block without neighbours in its share still has three quarters of the possible
# windows.
WINDOWS_IN_BLOCK = 4
# Each start of k-means finds its own optimum; the best of ten rarely changes when the last bits of the features differ.
STARTS = 10


@dataclass(frozen=True)
class Partition:
    """A partition of the training text.

    Attributes:
        bounds: int64 (blocks + 1,), where blocks begin and the last one ends, in tokens.
        share_of: int64 (blocks,), the share number of each block.
        count: number of shares; each has at least one block.
    """

    bounds: NDArray[np.int64]
    share_of: NDArray[np.int64]
    count: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each share. DiLoCo weights the outer gradients of unequal shares by it (section 6.1)."""
        sizes = np.bincount(self.share_of, weights=np.diff(self.bounds), minlength=self.count)
        return tuple(int(size) for size in sizes)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the partition; equal on two peers that have the same partition."""
        return hashlib.sha256(self.bounds.astype("<i8").tobytes() + self.share_of.astype("<i8").tobytes()).hexdigest()

    def spans(self, share: int) -> NDArray[np.int64]:
        """Begin and end in tokens, int64 (spans, 2), of the contiguous ranges of text of this share."""
        ours = np.concatenate([[False], self.share_of == share, [False]])
        # The places where it changes are begins and ends in turn.
        return self.bounds[np.flatnonzero(ours[1:] != ours[:-1])].reshape(-1, 2)


def block_bounds(num_tokens: int, *, context: int) -> NDArray[np.int64]:
    """Cut a text into equal blocks of at least WINDOWS_IN_BLOCK windows of `context` tokens; the last one is longer.

    Returns int64 (blocks + 1,): where blocks begin and the last one ends.
    """
    length = max(BLOCK_TOKENS, WINDOWS_IN_BLOCK * context)
    blocks = max(1, num_tokens // length)
    return np.append(np.arange(blocks, dtype=np.int64) * length, num_tokens)


def iid_partition(bounds: NDArray[np.int64], num_shares: int, *, seed: int) -> Partition:
    """Deal the blocks at random (the paper's i.i.d. setting); sizes differ by at most one block.

    Raises ConfigError if there are fewer blocks than shares.
    """
    check_enough_blocks(bounds, num_shares)
    return _dealt(bounds, np.arange(len(bounds) - 1) % num_shares, num_shares, seed)


def unbalanced_partition(
    bounds: NDArray[np.int64], num_shares: int, *, seed: int, largest_to_smallest: float = LARGEST_TO_SMALLEST
) -> Partition:
    """Deal the blocks at random, with sizes in geometric proportion; share 0 is the largest.

    The sizes differ as those of clusters do, but the contents do not, so the two effects can be measured separately.
    DiLoCo's appendix calls the imbalance of clusters "quite balanced" at k = 4 and "striking" at k = 64, and therefore
    weights by size.

    Raises ConfigError if the smallest share would have no block.
    """
    check_enough_blocks(bounds, num_shares)
    blocks = len(bounds) - 1
    proportions = largest_to_smallest ** -(np.arange(num_shares) / max(1, num_shares - 1))
    proportions /= proportions.sum()
    ends = np.floor(np.cumsum(proportions) * blocks + 0.5).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    if counts.min() < 1:
        raise ConfigError(
            f"num_shards = {num_shares}: the text has {blocks} blocks, and unbalanced shards need "
            f"{math.ceil(1 / proportions.min())}, so that the smallest has one; give more text, or fewer shards"
        )
    return _dealt(bounds, np.repeat(np.arange(num_shares), counts), num_shares, seed)


def clustered_partition(
    bounds: NDArray[np.int64], features: NDArray[np.floating], num_shares: int, *, seed: int
) -> Partition:
    """Make one share from each cluster of blocks, by k-means on their features. Their sizes may differ much.

    This is DiLoCo's non-i.i.d. setting (section 3.1), after Gururangan et al., "Scaling Expert Language Models with
    Unsupervised Domain Discovery", 2023.

    Args:
        bounds: int64 (blocks + 1,), from `block_bounds`.
        features: (blocks, any number), finite.
        num_shares: number of clusters.
        seed: seeds the initial centres.

    Raises:
        ConfigError: there are fewer blocks than shares, or fewer different ones.
    """
    check_enough_blocks(bounds, num_shares)
    assert len(features) == len(bounds) - 1
    # Imported here because it takes a second.
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    distinct = len(np.unique(features, axis=0))
    if distinct < num_shares:
        raise ConfigError(
            f"num_shards = {num_shares}: the text has only {distinct} different blocks to make clusters of; "
            f"give more text, or fewer shards"
        )
    with threadpool_limits(limits=1):  # several threads would add numbers in any order
        kmeans = KMeans(num_shares, n_init=STARTS, random_state=seed % 2**32)
        clusters = kmeans.fit_predict(features.astype(np.float64))
    # k-means numbers its clusters at random. Renumber: share 0 is that of the first block, 1 the next to appear, …
    found, first = np.unique(clusters, return_index=True)
    assert len(found) == num_shares
    names = np.empty(num_shares, dtype=np.int64)
    names[np.argsort(first)] = np.arange(num_shares)
    return Partition(bounds, names[clusters], num_shares)


def check_enough_blocks(bounds: NDArray[np.int64], num_shares: int) -> None:
    """Raise ConfigError if there are fewer blocks than shares."""
    blocks = len(bounds) - 1
    if not 1 <= num_shares <= blocks:
        raise ConfigError(
            f"num_shards = {num_shares}: must be between 1 and the number of blocks of the text, {blocks} of "
            f"{bounds[-1] // blocks} characters; give more text, or fewer shards"
        )


def _dealt(bounds: NDArray[np.int64], shares: NDArray[np.int64], num_shares: int, seed: int) -> Partition:
    """Assign the n-th block of a random order to the n-th entry of `shares`."""
    # Order by hash: numpy's permutation may differ between its versions.
    keys = [hashlib.sha256(f"{seed}/block {number}".encode()).digest() for number in range(len(bounds) - 1)]
    share_of = np.empty(len(keys), dtype=np.int64)
    share_of[sorted(range(len(keys)), key=keys.__getitem__)] = shares
    return Partition(bounds, share_of, num_shares)
