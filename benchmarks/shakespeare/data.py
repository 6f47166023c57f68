"""nanoGPT's data/shakespeare_char from the text that the user gives, and the loss on a fixed part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from p2ptrain.errors import ConfigError
from p2ptrain.training.data import fixed_windows, load_corpus
from p2ptrain.training.data.tokenizer import Ids
from p2ptrain.training.models import context_length

# tinyshakespeare's.
ALPHABET = 65
# Spread over all of the held-out text, none over another: 64,000 characters of 111,540. nanoGPT draws 240 at random.
EVAL_WINDOWS, EVAL_BATCH = 1000, 50


def prepare(text: Path, out: Path) -> Path:
    """Write train.bin and val.bin as nanoGPT's data/shakespeare_char/prepare.py does. Returns `out`.

    Raises ConfigError if the text has not the alphabet of tinyshakespeare.
    """
    data = text.read_text(encoding="utf-8")
    alphabet = sorted(set(data))
    if len(alphabet) != ALPHABET:
        raise ConfigError(
            f"--text {text}: has {len(alphabet)} different characters, tinyshakespeare {ALPHABET}; give its input.txt"
        )
    ids = {character: number for number, character in enumerate(alphabet)}
    tokens = np.array([ids[character] for character in data], dtype="<u2")
    cut = int(0.9 * len(data))
    out.mkdir(parents=True, exist_ok=True)
    tokens[:cut].tofile(out / "train.bin")
    tokens[cut:].tofile(out / "val.bin")
    return out


@torch.no_grad()
def held_out_loss(
    model: nn.Module, data: Path, windows: int = EVAL_WINDOWS, vocab_size: int = ALPHABET
) -> float:  # fmt: skip
    """Mean loss in nats on fixed windows of the held-out tokens."""
    model.eval()
    held_out = load_corpus(str(data), Ids(vocab_size)).held_out
    inputs, targets = fixed_windows(held_out, context=context_length(model), count=windows)
    losses = [
        functional.cross_entropy(model(some).flatten(0, 1), wanted.flatten(), reduction="sum").item()
        for some, wanted in zip(*(torch.split(part, EVAL_BATCH) for part in (inputs, targets)), strict=True)
    ]
    return sum(losses) / targets.numel()
