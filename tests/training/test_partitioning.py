"""A run's shares: every block is in exactly one, sizes are as documented, clusters differ in content, and the same
numbers give the same partition.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import partitioning
from p2ptrain.training.data import Corpus
from p2ptrain.training.data.corpus import BLOCK_TOKENS
from p2ptrain.training.models import GPT, GPTConfig
from p2ptrain.training.partitioning import (
    Partition,
    block_bounds,
    block_features,
    choose_share,
    clustered_partition,
    iid_partition,
    make_partition,
    train_briefly,
    unbalanced_partition,
)
from tests.training.characters import encode

BOUNDS = block_bounds(200 * BLOCK_TOKENS + 77, context=64)
CPU = torch.device("cpu")
RUN = RunConfig(model="gpt-demo", num_shards=3, sharding="clusters")
WORDS = ("the sea was calm and the boat lay still ", "0x3f, 17, 2048, 0b1101, 99, ", "<<-->> {}[]()* ;;;; == != ")


def _kinds_and_corpus(blocks: int = 48) -> tuple[np.ndarray, Corpus]:
    """Blocks of three kinds, in random order; words in random order within each."""
    generator = np.random.default_rng(0)
    kinds = generator.integers(3, size=blocks)
    texts = []
    for kind in kinds:
        words = WORDS[kind].split(" ")
        texts.append(" ".join(words[n] for n in generator.integers(len(words), size=BLOCK_TOKENS))[:BLOCK_TOKENS])
    training = encode("".join(text.ljust(BLOCK_TOKENS) for text in texts))
    return kinds, Corpus(training=training, held_out=encode(WORDS[0] * 50))


KINDS, CORPUS = _kinds_and_corpus()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _tiny() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(GPTConfig(vocab_size=98, layers=1, heads=2, width=8, context=16))


def _partition(run: RunConfig) -> Partition:
    partition = make_partition(run, CORPUS, context=64, device=CPU)
    assert partition is not None
    return partition


@pytest.mark.slow
def test_clusters_are_kinds_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "STEPS", 100)
    partition = _partition(RUN)
    assert [len(set(KINDS[partition.share_of == share])) for share in range(3)] == [1, 1, 1]
    kind_of_share = [KINDS[partition.share_of == share][0] for share in range(3)]
    assert partition.sizes == tuple(BLOCK_TOKENS * np.count_nonzero(kind == KINDS) for kind in kind_of_share)


@pytest.mark.slow
def test_clusters_do_not_depend_on_what_went_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "STEPS", 30)
    features: list[np.ndarray] = []

    def kept(*arguments: object) -> np.ndarray:
        features.append(block_features(*arguments))  # type: ignore[arg-type]
        return features[-1]

    monkeypatch.setattr(partitioning, "block_features", kept)
    torch.manual_seed(1)
    first = _partition(RUN)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    torch.set_num_threads(2)
    assert _partition(RUN).digest == first.digest
    np.testing.assert_array_equal(features[0], features[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2


def test_the_other_ways_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "build_of", lambda *arguments, **named: pytest.fail("built a model"))
    iid = _partition(RunConfig(num_shards=4, sharding="iid"))
    assert set(iid.sizes) == {12 * BLOCK_TOKENS}
    unbalanced = _partition(RunConfig(num_shards=4, sharding="unbalanced"))
    assert unbalanced.sizes[0] > 3 * unbalanced.sizes[3]
    assert iid.digest != _partition(RunConfig(num_shards=4, run_seed=1)).digest
    assert make_partition(RunConfig(), CORPUS, context=64, device=CPU) is None
    with pytest.raises(ConfigError, match=r"num_shards = 49: .*48 of 4096 characters"):
        _partition(RunConfig(model="gpt-demo", num_shards=49, sharding="clusters"))


def test_features_are_the_last_layers_mean_over_the_block() -> None:
    model = _tiny()
    bounds = np.array([0, 300, 700])
    features = block_features(model, CORPUS.training, bounds)
    assert features.shape == (2, 8)
    # 1024 tokens: 64 windows of 16, from the block's first token to its last.
    starts = np.linspace(300, 700 - 16, 64).astype(int)
    windows = torch.stack([torch.from_numpy(CORPUS.training[start : start + 16].astype(np.int64)) for start in starts])
    with torch.no_grad():
        expected = model.features(windows).mean(dim=(0, 1))
        logits = model(windows).mean(dim=(0, 1))
    np.testing.assert_allclose(features[1], expected.numpy(), rtol=1e-4, atol=1e-5)
    # Without a method `features` the logits are the features.
    other = nn.Sequential(model)
    other.context = 16
    np.testing.assert_allclose(block_features(other, CORPUS.training, bounds)[1], logits.numpy(), rtol=1e-4, atol=1e-5)


def test_blocks_shorter_than_a_window_have_features() -> None:
    features = block_features(_tiny(), CORPUS.training, np.array([0, 10, 25]))
    assert np.isfinite(features).all()
    assert not np.array_equal(features[0], features[1])


def test_brief_training_learns_and_leaves_the_random_state() -> None:
    model = _tiny()
    before = _loss(model)
    state = torch.get_rng_state()
    train_briefly(model, CORPUS, RunConfig(lr=1e-2, warmup_steps=10**6), steps=30)
    assert torch.equal(torch.get_rng_state(), state)
    assert _loss(model) < before - 0.5


def _loss(model: nn.Module) -> float:
    tokens = torch.from_numpy(CORPUS.training[:17].astype(np.int64))[None]
    with torch.no_grad():
        return nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).item()


def test_a_share_is_given_or_follows_from_the_identity() -> None:
    assert choose_share(2, RUN, "QmA") == 2
    assert choose_share(None, RUN, "QmA") == RUN.shard_of("QmA")
    with pytest.raises(ConfigError, match="--shard 3: must be 0 to 2"):
        choose_share(3, RUN, "QmA")


def test_long_windows_get_long_blocks() -> None:
    partition = make_partition(RunConfig(num_shards=2), CORPUS, context=8000, device=CPU)
    assert partition is not None
    assert partition.bounds.tolist() == block_bounds(len(CORPUS.training), context=8000).tolist()
    assert np.diff(partition.bounds).min() >= 32_000


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


def test_k_means_finds_the_kinds_of_text() -> None:
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
