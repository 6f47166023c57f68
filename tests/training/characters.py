"""Shorthands for the tokenizer of characters."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from p2ptrain.training.data import Characters

VOCAB_SIZE = Characters.vocab_size


def encode(text: str) -> NDArray[np.uint8]:
    return Characters().encode([text])[0]


def decode(tokens: Iterable[int]) -> str:
    return Characters().decode(tokens)
