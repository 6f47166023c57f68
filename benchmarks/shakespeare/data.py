"""nanoGPT's data/shakespeare_char from the text that the user gives, and the loss on a fixed part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from benchmarks.held_out import mean_loss
from p2ptrain.errors import ConfigError
from p2ptrain.training.data import load_corpus
from p2ptrain.training.data.tokenizer import Ids

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


def held_out_loss(
    model: nn.Module, data: Path, windows: int = EVAL_WINDOWS, vocab_size: int = ALPHABET
) -> float:  # fmt: skip
    """Mean loss in nats on fixed windows of the held-out tokens."""
    return mean_loss(model, load_corpus(str(data), Ids(vocab_size)).held_out, windows=windows, batch=EVAL_BATCH)
