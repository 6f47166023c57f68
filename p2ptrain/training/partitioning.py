"""Computes the shares of a run's text, on every peer alone: from the settings, the text and, for clusters, a model.

Clusters are made from a model's last-layer features (DiLoCo, section 3.1). The paper uses a pretrained model. Here it
is the run's own model, trained locally from its initial weights for a few hundred small steps. That is enough to tell
prose from tables, and every peer can do it at any time, also long after the run has started. The checkpoint given as
`init_from` cannot be used, because only the peer that started the run has it. With a better model at hand, call
`block_features` on it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.extras import require_extra
from p2ptrain.training.data import Corpus, Partition, Tokens
from p2ptrain.training.data.partition import (
    block_bounds,
    check_enough_blocks,
    clustered_partition,
    iid_partition,
    unbalanced_partition,
)
from p2ptrain.training.models import build_of, context_length
from p2ptrain.training.trainer import Trainer, TrainingData

# Measured on the standard library (docs/log/): with the demo model this takes ten seconds on one core, and more
# steps or tokens make the clusters hardly more different from each other.
STEPS = 400
TOKENS_PER_STEP = 512
WARMUP_STEPS = 20
# A quarter of a block, spread over it. With 256 tokens the clusters differed a quarter less.
TOKENS_PER_BLOCK = 1024
# Tokens in one forward pass: bounds the memory for the logits of models without features.
PASS_TOKENS = 4096
# Models up to this size run on one CPU thread, which rounds alike on most machines and takes a minute at worst. Larger
# ones run on the peer's device.
CPU_PARAMETERS = 1_000_000

logger = logging.getLogger(__name__)


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
    # Both before training the model, which takes minutes.
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
    # Only a method: in some models `features` is a submodule, which need not take tokens.
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
