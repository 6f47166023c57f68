"""A run's shares: clusters differ in content, the same numbers give the same partition, global state is untouched."""

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
    make_partition,
    train_briefly,
)
from tests.training.characters import encode

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
