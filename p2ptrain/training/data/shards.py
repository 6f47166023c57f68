"""Shards: the training text cut into blocks, and the blocks dealt to a fixed number of parts (DiLoCo, section 3).

A block is some 4,096 neighbouring characters, whichever files they are from. Blocks of one shard that are neighbours
in the text are one span, and windows are drawn within spans, so a window never holds a character of another shard.

A partition is a function of the text's length and of numbers that all peers of a run share, so every peer computes
it by itself. It is the same on two machines as far as their text is: "stdlib" differs between versions of Python,
and with text of one's own, peers that bring different files have shards of different texts, which may overlap.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.corpus import BLOCK_TOKENS

# Guess: large enough to tell weighting by size from a plain mean (with 8 shards the largest has 23 % of the text
# and the smallest 6 %), small enough that the smallest still has many windows.
LARGEST_TO_SMALLEST = 4.0
# Guess: in blocks of four windows, three quarters of the places are drawn from even where no neighbour is ours.
WINDOWS_IN_BLOCK = 4


@dataclass(frozen=True)
class Shards:
    """A partition of the training text.

    Attributes:
        bounds: int64 (blocks + 1,), where blocks begin and the last one ends, in tokens.
        shard_of: int64 (blocks,), the shard of each block.
        count: number of shards; each has at least one block.
    """

    bounds: NDArray[np.int64]
    shard_of: NDArray[np.int64]
    count: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each shard, by which the paper weights outer gradients of unlike shards (DiLoCo, section 6.1)."""
        sizes = np.bincount(self.shard_of, weights=np.diff(self.bounds), minlength=self.count)
        return tuple(int(size) for size in sizes)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the partition: equal on two peers that have the same one."""
        return hashlib.sha256(self.bounds.astype("<i8").tobytes() + self.shard_of.astype("<i8").tobytes()).hexdigest()

    def spans(self, shard: int) -> NDArray[np.int64]:
        """Begin and end in tokens, int64 (spans, 2), of the longest stretches of text that are of this shard alone."""
        ours = np.concatenate([[False], self.shard_of == shard, [False]])
        # Begins and ends take turns where the answer changes.
        return self.bounds[np.flatnonzero(ours[1:] != ours[:-1])].reshape(-1, 2)


def block_bounds(num_tokens: int, *, context: int) -> NDArray[np.int64]:
    """Cut a text into blocks of equal length, at least WINDOWS_IN_BLOCK windows each; the last takes what is left.

    Args:
        num_tokens: length of the text.
        context: length of the windows that are drawn from it, in tokens.

    Returns:
        int64 (blocks + 1,): where blocks begin and the last one ends.
    """
    length = max(BLOCK_TOKENS, WINDOWS_IN_BLOCK * context)
    blocks = max(1, num_tokens // length)
    return np.append(np.arange(blocks, dtype=np.int64) * length, num_tokens)


def iid_shards(bounds: NDArray[np.int64], num_shards: int, *, seed: int) -> Shards:
    """Deal the blocks at random (the paper's i.i.d. setting): sizes differ by a block at most.

    Raises:
        ConfigError: there are fewer blocks than shards.
    """
    check_enough_blocks(bounds, num_shards)
    return _dealt(bounds, np.arange(len(bounds) - 1) % num_shards, num_shards, seed)


def unbalanced_shards(
    bounds: NDArray[np.int64], num_shards: int, *, seed: int, largest_to_smallest: float = LARGEST_TO_SMALLEST
) -> Shards:
    """As `iid_shards`, with sizes in geometric proportion: shard 0 is the largest.

    It has the sizes of a clustering without its differences in content, so that the two can be told apart: DiLoCo's
    appendix finds clusters "quite balanced" at k = 4 and "striking" at k = 64, and weights by size for that.

    Raises:
        ConfigError: the smallest shard would have no block.
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


def check_enough_blocks(bounds: NDArray[np.int64], num_shards: int) -> None:
    """Raise ConfigError where a shard would have no block."""
    blocks = len(bounds) - 1
    if not 1 <= num_shards <= blocks:
        raise ConfigError(
            f"num_shards = {num_shards}: must be between 1 and the number of blocks of the text, {blocks} of "
            f"{bounds[-1] // blocks} characters; give more text, or fewer shards"
        )


def _dealt(bounds: NDArray[np.int64], shards: NDArray[np.int64], num_shards: int, seed: int) -> Shards:
    """Give the n-th block of a random order to the n-th of `shards`."""
    # By hash, not by numpy's permutation, which may differ between its versions.
    keys = [hashlib.sha256(f"{seed}/block {number}".encode()).digest() for number in range(len(bounds) - 1)]
    shard_of = np.empty(len(keys), dtype=np.int64)
    shard_of[sorted(range(len(keys)), key=keys.__getitem__)] = shards
    return Shards(bounds, shard_of, num_shards)
