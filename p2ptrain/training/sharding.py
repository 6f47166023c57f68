"""The shards of a run, which every peer computes by itself: from its settings, the text and, for clusters, a model.

Clusters are made of a model's last-layer features (DiLoCo, section 3.1). The paper has a pretrained model. Here it is
the run's own at its first weights, trained alone for some hundred small steps: enough to tell prose from tables, and
the one model that each peer can have at any time, before the run and long after its start. It is not the checkpoint
of `init_from`, which only the founder has; whoever holds a better model gives it to `block_features` himself.
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
from p2ptrain.training.data import (
    VOCAB_SIZE,
    Corpus,
    Shards,
    block_bounds,
    clustered_shards,
    iid_shards,
    unbalanced_shards,
)
from p2ptrain.training.data.shards import check_enough_blocks
from p2ptrain.training.models import build, context_length
from p2ptrain.training.trainer import Trainer

# Measured on the standard library (docs/LOG.md): with the demo model this takes ten seconds of one core, and more of
# either makes the clusters hardly more different from each other.
STEPS = 400
TOKENS_PER_STEP = 512
WARMUP_STEPS = 20
# A quarter of a block, spread over it. With 256 tokens a quarter of the difference between clusters was lost.
TOKENS_PER_BLOCK = 1024
# Tokens in one pass of the model: bounds the memory for the logits of models without features.
PASS_TOKENS = 4096
# Up to here on one CPU thread, which rounds alike on most machines: a minute at worst. Larger models take the device.
CPU_PARAMETERS = 1_000_000

logger = logging.getLogger(__name__)


def make_shards(run: RunConfig, corpus: Corpus, *, context: int, device: torch.device) -> Shards | None:
    """The partition of the training text that a run asks for, or None where every peer draws from all of it.

    "iid" and "unbalanced" depend on the run's seed, the length of the text and the model's context: they are the same
    wherever those are. "clusters" depends on the text itself and on floating-point arithmetic. On one machine with one
    version of torch and scikit-learn it is the same each time. Another processor rounds sums differently: with plain
    SSE instead of AVX the demo model's features moved by 1e-4, and no block of 996 changed its cluster (8, 32 and 64
    clusters), but another text may have blocks that lie so close between two, and another version of a library may
    find other clusters. Larger models are trained on the device, where GPUs of two kinds differ by more.
    `Shards.digest` shows whether two peers have the same. Nothing breaks where they differ: shards then overlap.

    Args:
        run: gives `num_shards`, `sharding`, the model and the seed.
        corpus: the text; its training part is cut.
        context: length of the windows that will be drawn, in tokens.
        device: where a model of more than CPU_PARAMETERS is trained for features.

    Raises:
        ConfigError: the text is too small for so many shards, or the model cannot be trained at the run's rate.
    """
    if run.num_shards == 0:
        return None
    bounds = block_bounds(len(corpus.training), context=context)
    match run.sharding:
        case "iid":
            return iid_shards(bounds, run.num_shards, seed=run.run_seed)
        case "unbalanced":
            return unbalanced_shards(bounds, run.num_shards, seed=run.run_seed)
    # Before the minutes that a model takes.
    require_extra("simulate", "sharding = 'clusters'")
    check_enough_blocks(bounds, run.num_shards)
    model = build(run.model, vocab_size=VOCAB_SIZE, seed=run.run_seed)
    small = sum(parameter.numel() for parameter in model.parameters()) <= CPU_PARAMETERS
    with _one_thread() if small else nullcontext():
        model = model.to("cpu" if small else device)
        train_briefly(model, corpus, run)
        features = block_features(model, corpus.training, bounds)
    if not np.isfinite(features).all():
        raise ConfigError(f"lr = {run.lr}: the model that clusters the text diverged; start a run with a lower --lr")
    return clustered_shards(bounds, features, run.num_shards, seed=run.run_seed)


def choose_shard(given: int | None, run: RunConfig, peer_id: str) -> int:
    """The shard of a peer: the one the user gave, else by the hash of its id.

    By hash, few peers may meet on one shard and leave another to nobody; who runs them all numbers them himself.

    Raises:
        ConfigError: the run has no such shard.
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


def train_briefly(model: nn.Module, corpus: Corpus, run: RunConfig, *, steps: int = STEPS) -> None:
    """Train `model` in place, alone, on windows from all of the text; the global random state stays as it was.

    Args:
        model: on its device.
        corpus: the text.
        run: gives the learning rate, its decay over `steps`, and the seed of the windows.
        steps: of TOKENS_PER_STEP tokens.
    """
    brief = dataclasses.replace(run, total_steps=steps, warmup_steps=min(WARMUP_STEPS, steps))
    with torch.random.fork_rng(devices=[]):
        batch_size = max(1, TOKENS_PER_STEP // context_length(model))
        trainer = Trainer(model, corpus, brief, batch_size=batch_size, seed=run.run_seed)
        for step in range(steps):
            loss, _ = trainer.step(step)
            if step % 50 == 0:
                logger.debug("features for shards: step %d of %d, loss %.3f", step, steps, loss)


@torch.no_grad()
def block_features(model: nn.Module, tokens: NDArray[np.uint8], bounds: NDArray[np.int64]) -> NDArray[np.float32]:
    """What a model makes of each block: its last layer's features, averaged over windows spread over the block.

    Args:
        model: maps int64 tokens (B, T) to logits. Where it has a method `features`, as our GPT, that is asked, for
            (B, T, F); else the logits are the features.
        tokens: the text.
        bounds: int64 (blocks + 1,), where blocks begin and the last one ends.

    Returns:
        float32 (blocks, F).
    """
    model.eval()
    device = next(model.parameters()).device
    # A method: others call a part of their model so, which need not take tokens.
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
def _one_thread() -> Generator[None, None, None]:
    """Torch on one CPU thread: more of them would add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
