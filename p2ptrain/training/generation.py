"""Text from a trained model, one character at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training.data import VOCAB_SIZE, decode, encode
from p2ptrain.training.models import build, context_length


def load_model(path: Path) -> nn.Module:
    """Load the model of a checkpoint, as `checkpoint.load_given`. Raises ConfigError."""
    saved = checkpoint.load_given(path, parts=["model"])
    run = RunConfig.from_stated(saved.info["run"])
    model = build(run.model, vocab_size=VOCAB_SIZE, seed=run.run_seed)
    model.load_state_dict(saved.state["model"])
    return model


@torch.no_grad()
def generate_text(model: nn.Module, prompt: str, *, length: int, temperature: float, seed: int) -> Iterator[str]:
    """Yield `length` characters that continue `prompt`.

    Args:
        model: maps int64 tokens (1, T) to logits (1, T, V).
        prompt: may be empty; if longer than the model's context, only its end is used.
        temperature: 0 always takes the likeliest character; 1 samples from the model's distribution.
        seed: seeds the sampling.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    context = context_length(model)
    tokens = torch.from_numpy(encode(prompt or "\n").astype("int64"))[None]  # (1, T)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1, :VOCAB_SIZE].float()
        if temperature == 0:
            chosen = logits.argmax(keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens[:, -context:], chosen[None]], dim=1)
        yield decode(chosen.tolist())
