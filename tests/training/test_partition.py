"""Shares: every block is in exactly one, sizes are as documented, and the same numbers give the same partition."""

from __future__ import annotations

import numpy as np
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.training import partitioning
from p2ptrain.training.data.corpus import BLOCK_TOKENS
from p2ptrain.training.partitioning import (
    Partition,
    block_bounds,
    clustered_partition,
    iid_partition,
    unbalanced_partition,
)

BOUNDS = block_bounds(200 * BLOCK_TOKENS + 77, context=64)


def _covered(partition: Partition) -> np.ndarray:
    """Count in how many spans, of all shares, each token lies."""
    counts = np.zeros(int(partition.bounds[-1]), dtype=np.int64)
    for share in range(partition.count):
        for begin, end in partition.spans(share):
            counts[begin:end] += 1
    return counts


def test_blocks_are_equal_and_the_last_takes_what_is_left() -> None:
    assert np.diff(BOUNDS).tolist() == [BLOCK_TOKENS] * 199 + [BLOCK_TOKENS + 77]
    # Long windows need long blocks; a short text is one.
    assert block_bounds(100_000, context=10_000).tolist() == [0, 40_000, 100_000]
    assert block_bounds(100, context=64).tolist() == [0, 100]


@pytest.mark.parametrize("deal", [iid_partition, unbalanced_partition])
@pytest.mark.parametrize("num_shares", [1, 2, 7, 64])
def test_every_token_is_in_exactly_one_share(deal, num_shares: int) -> None:
    bounds = block_bounds(400 * BLOCK_TOKENS + 77, context=64)
    partition = deal(bounds, num_shares, seed=3)
    assert (_covered(partition) == 1).all()
    assert sum(partition.sizes) == bounds[-1]
    assert len(partition.sizes) == num_shares
    assert partition.sizes == tuple(int(np.diff(partition.spans(share)).sum()) for share in range(num_shares))


def test_spans_are_as_long_as_they_can_be() -> None:
    partition = Partition(np.array([0, 10, 20, 30, 45]), np.array([1, 1, 0, 1]), 2)
    assert partition.spans(0).tolist() == [[20, 30]]
    assert partition.spans(1).tolist() == [[0, 20], [30, 45]]
    assert partition.sizes == (10, 35)
    whole = iid_partition(BOUNDS, 1, seed=0)
    assert whole.spans(0).tolist() == [[0, BOUNDS[-1]]]


def test_iid_shares_differ_by_a_block_at_most() -> None:
    counts = np.bincount(iid_partition(BOUNDS, 7, seed=0).share_of)
    assert counts.max() - counts.min() == 1


def test_iid_shares_are_spread_over_the_text() -> None:
    """The mean position of a share's blocks is that of the text, to within a few standard errors."""
    partition = iid_partition(block_bounds(1000 * BLOCK_TOKENS, context=64), 4, seed=0)
    for share in range(4):
        places = np.flatnonzero(partition.share_of == share)
        assert abs(places.mean() - 499.5) < 4 * 1000 / (12 * 250) ** 0.5


def test_unbalanced_sizes_are_in_geometric_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = block_bounds(4000 * BLOCK_TOKENS, context=64)
    sizes = np.array(unbalanced_partition(bounds, 8, seed=0).sizes, dtype=float)
    assert sizes[0] / sizes[-1] == pytest.approx(4.0, rel=0.02)
    assert sizes[:-1] / sizes[1:] == pytest.approx(np.full(7, 4 ** (1 / 7)), rel=0.02)
    monkeypatch.setattr(partitioning, "LARGEST_TO_SMALLEST", 100.0)
    steep = np.array(unbalanced_partition(bounds, 3, seed=0).sizes)
    assert steep[0] / steep[-1] == pytest.approx(100.0, rel=0.05)


def test_a_partition_depends_on_its_numbers_alone() -> None:
    for deal in (iid_partition, unbalanced_partition):
        first = deal(BOUNDS, 5, seed=1)
        assert first.digest == deal(BOUNDS, 5, seed=1).digest
        assert first.digest != deal(BOUNDS, 5, seed=2).digest
    # Golden: the same on every machine, with any version of numpy.
    assert iid_partition(block_bounds(8 * BLOCK_TOKENS, context=64), 3, seed=1).share_of.tolist() == [
        2,
        0,
        1,
        0,
        1,
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("num_shares", [0, 201, 2**62])
def test_more_shares_than_blocks_are_refused(num_shares: int) -> None:
    features = np.zeros((200, 2))
    for deal in (iid_partition, unbalanced_partition):
        with pytest.raises(ConfigError, match=f"num_shards = {num_shares}: must be between 1 and .* 200 of 4096"):
            deal(BOUNDS, num_shares, seed=0)
    with pytest.raises(ConfigError, match=f"num_shards = {num_shares}: "):
        clustered_partition(BOUNDS, features, num_shares, seed=0)


def test_a_smallest_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 10 blocks, and unbalanced shards need 18, .* give more text"):
        unbalanced_partition(block_bounds(10 * BLOCK_TOKENS, context=64), 8, seed=0)


def _three_kinds() -> tuple[np.ndarray, np.ndarray]:
    """The kind of each block of BOUNDS, and features around one centre per kind."""
    generator = np.random.default_rng(0)
    kinds = generator.choice(3, size=200, p=[0.6, 0.3, 0.1])
    centres = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    return kinds, centres[kinds] + generator.normal(size=(200, 2))


def test_clusters_are_the_kinds_of_text() -> None:
    kinds, features = _three_kinds()
    partition = clustered_partition(BOUNDS, features, 3, seed=0)
    assert (_covered(partition) == 1).all()
    kind_of_share = [set(kinds[partition.share_of == share]) for share in range(3)]
    assert all(len(kind) == 1 for kind in kind_of_share)
    assert set.union(*kind_of_share) == {0, 1, 2}


def test_clusters_are_numbered_by_the_text_not_by_chance() -> None:
    _, features = _three_kinds()
    digests = {clustered_partition(BOUNDS, features, 3, seed=seed).digest for seed in range(5)}
    assert len(digests) == 1
    nudged = features * (1 + 1e-6 * np.random.default_rng(1).normal(size=features.shape))
    assert clustered_partition(BOUNDS, nudged.astype(np.float32), 3, seed=0).digest in digests
    partition = clustered_partition(BOUNDS, features, 3, seed=0)
    assert np.unique(partition.share_of, return_index=True)[1].tolist() == sorted(
        np.unique(partition.share_of, return_index=True)[1]
    )


def test_blocks_that_are_all_alike_are_no_clusters() -> None:
    with pytest.raises(ConfigError, match="has only 1 different blocks to make clusters of"):
        clustered_partition(BOUNDS, np.zeros((200, 2)), 3, seed=0)
