"""Partitions a run's training text: cuts it into blocks and deals them to a fixed number of shares (DiLoCo, section 3).

Each peer trains on one share. Flags and messages call it a shard, as DiLoCo does; here a shard is a file of tokens.

A block is about 4,096 consecutive characters, regardless of files. Adjacent blocks of one share form a span, and
windows are drawn within spans, so a window never holds a character of another share.

Every peer computes the partition locally, from the settings, the length of the text and, for clusters, the text and a
model. Two machines get the same shares if they have the same text. "stdlib" differs between versions of Python. Peers
that bring different files have shares of different texts, which may overlap.

Clusters are made from a model's last-layer features (DiLoCo, section 3.1). The paper uses a pretrained model. Here it
is the run's own model, trained locally from its initial weights for a few hundred small steps. That is enough to tell
prose from tables, and every peer can do it at any time, also long after the run has started. The checkpoint given as
`init_from` cannot be used, because only the peer that started the run has it. With a better model at hand, call
`block_features` on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import math
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.extras import require_extra
from p2ptrain.training.data import Corpus, Tokens
from p2ptrain.training.data.corpus import BLOCK_TOKENS
from p2ptrain.training.models import build_of, context_length
from p2ptrain.training.trainer import Trainer, TrainingData

# Guess: large enough that weighting by size differs from a plain mean (with 8 shares the largest has 23 % of the text
# and the smallest 6 %), small enough that the smallest still has many windows.
LARGEST_TO_SMALLEST = 4.0
# Guess: with four windows per block, a block without neighbours in its share still has three quarters of the possible
# windows.
WINDOWS_IN_BLOCK = 4
# Each start of k-means finds its own optimum; the best of ten rarely changes when the last bits of the features differ.
STARTS = 10
# Measured on the standard library (docs/log/): with the demo model this takes ten seconds on one core, and more
# steps or tokens make the clusters hardly more different from each other.
STEPS = 400
TOKENS_PER_STEP = 512
WARMUP_STEPS = 20
# A quarter of a block, spread over it. With 256 tokens the clusters differed a quarter less.
TOKENS_PER_BLOCK = 1024
# Tokens in one forward pass. This bounds the memory for the logits of models without features.
PASS_TOKENS = 4096
# Models up to this size run on one CPU thread, which rounds alike on most machines and takes a minute at worst. Larger
# ones run on the peer's device.
CPU_PARAMETERS = 1_000_000

logger = logging.getLogger(__name__)


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
        # A span begins or ends where this changes.
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


def unbalanced_partition(bounds: NDArray[np.int64], num_shares: int, *, seed: int) -> Partition:
    """Deal the blocks at random, with sizes in geometric proportion; share 0 is the largest.

    The sizes differ as those of clusters do, but the contents do not, so the two effects can be measured separately.
    DiLoCo's appendix calls the imbalance of clusters "quite balanced" at k = 4 and "striking" at k = 64, and therefore
    weights by size.

    Raises ConfigError if the smallest share would have no block.
    """
    check_enough_blocks(bounds, num_shares)
    blocks = len(bounds) - 1
    proportions = LARGEST_TO_SMALLEST ** -(np.arange(num_shares) / max(1, num_shares - 1))
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


def make_partition(run: RunConfig, corpus: Corpus, *, context: int, device: torch.device) -> Partition | None:
    """Compute the run's partition of the training text; None if every peer trains on all of it.

    "iid" and "unbalanced" depend only on the run's seed, the length of the text and the model's context. "clusters"
    also depends on the text, the versions of torch and scikit-learn, and the processor: with plain SSE instead of AVX
    the demo model's features moved by 1e-4, and none of 996 blocks changed its cluster. `Partition.digest` shows
    whether two peers have the same partition. If they differ, their shares overlap; nothing else happens.

    Blocks for up to a minute with "clusters", longer for models of more than CPU_PARAMETERS.

    Args:
        run: gives `num_shards`, `sharding`, the model and the seed.
        corpus: the text; its training part is cut.
        context: length of the windows that will be drawn, in tokens.
        device: trains models of more than CPU_PARAMETERS.

    Raises:
        ConfigError: the text is too small for so many shares, or the model diverges at the run's learning rate.
    """
    if run.num_shards == 0:
        return None
    bounds = block_bounds(len(corpus.training), context=context)
    match run.sharding:
        case "iid":
            return iid_partition(bounds, run.num_shards, seed=run.run_seed)
        case "unbalanced":
            return unbalanced_partition(bounds, run.num_shards, seed=run.run_seed)
    # Check both before training the model, which takes minutes.
    require_extra("simulate", "sharding = 'clusters'")
    check_enough_blocks(bounds, run.num_shards)
    model = build_of(run)
    small = sum(parameter.numel() for parameter in model.parameters()) <= CPU_PARAMETERS
    with one_thread() if small else nullcontext():
        model = model.to("cpu" if small else device)
        train_briefly(model, corpus, run, steps=STEPS)
        features = block_features(model, corpus.training, bounds)
    if not np.isfinite(features).all():
        raise ConfigError(f"lr = {run.lr}: the model that clusters the text diverged; start a run with a lower --lr")
    return clustered_partition(bounds, features, run.num_shards, seed=run.run_seed)


def choose_share(given: int | None, run: RunConfig, peer_id: str) -> int:
    """Return the share of a peer: the one the user gave, else one by the hash of its id, which peers may share.

    Raises ConfigError if the run has no such share.
    """
    if given is None:
        return run.shard_of(peer_id)
    if not 0 <= given < run.num_shards:
        rule = f"must be 0 to {run.num_shards - 1}" if run.num_shards else "has no meaning"
        raise ConfigError(
            f"--shard {given}: {rule} in run {run.run_id!r}, which has num_shards = {run.num_shards}; "
            f"leave it out, or start a run with more --num-shards"
        )
    return given


def train_briefly(model: nn.Module, corpus: Corpus, run: RunConfig, *, steps: int) -> None:
    """Train `model` in place, locally, on windows from all of the text, for `steps` of TOKENS_PER_STEP tokens.

    `run` gives the learning rate, which decays over `steps`, and the seed. The CPU's global random state is restored.
    """
    brief = dataclasses.replace(run, total_steps=steps, warmup_steps=min(WARMUP_STEPS, steps))
    with torch.random.fork_rng(devices=[]):
        batch_size = max(1, TOKENS_PER_STEP // context_length(model))
        trainer = Trainer(model, TrainingData(corpus), brief, batch_size=batch_size, seed=run.run_seed)
        for step in range(steps):
            loss, _ = trainer.step(step)
            if step % 50 == 0:
                logger.debug("features for shares: step %d of %d, loss %.3f", step, steps, loss)


@torch.no_grad()
def block_features(model: nn.Module, tokens: Tokens, bounds: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute a model's last-layer features of each block, averaged over windows spread over the block.

    Args:
        model: maps int64 tokens (B, T) to logits. If it has a method `features`, as our GPT does, that is called
            instead, and returns (B, T, F); else the logits are the features.
        tokens: the text.
        bounds: int64 (blocks + 1,), where blocks begin and the last one ends.

    Returns:
        float32 (blocks, F).
    """
    model.eval()
    device = next(model.parameters()).device
    # In some models `features` is a submodule, which need not take tokens: only a method counts.
    features_of = getattr(model, "features", None)
    last_layer = features_of if inspect.ismethod(features_of) else model
    lengths = np.diff(bounds)
    window = int(min(context_length(model), TOKENS_PER_BLOCK, lengths.min()))
    count = max(1, TOKENS_PER_BLOCK // window)
    # (blocks, count) -> (blocks * count,)
    starts = np.linspace(bounds[:-1], bounds[1:] - window, count, axis=1).astype(np.int64).reshape(-1)
    means = []
    for chunk in np.split(starts, range(0, len(starts), max(1, PASS_TOKENS // window))[1:]):
        windows = torch.from_numpy(tokens[chunk[:, None] + np.arange(window)].astype(np.int64)).to(device)
        means.append(last_layer(windows).float().mean(dim=1).cpu())
    features: NDArray[np.float32] = torch.cat(means).reshape(len(lengths), count, -1).mean(dim=1).numpy()
    return features


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Run torch on one CPU thread within the block: several threads would add numbers in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
