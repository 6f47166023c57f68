"""The vocabulary is a constant."""

from __future__ import annotations

import string

import numpy as np

from tests.training.characters import VOCAB_SIZE, decode, encode


def test_ascii_text_survives_a_round_trip() -> None:
    text = string.digits + string.ascii_letters + string.punctuation + " \n\t"
    tokens = encode(text)
    assert tokens.dtype == np.uint8
    assert decode(tokens.tolist()) == text
    assert sorted(tokens.tolist()) == list(range(VOCAB_SIZE - 1))


def test_everything_else_is_one_unknown_symbol_per_character() -> None:
    tokens = encode("aé\r\0𝄞b")
    assert decode(tokens.tolist()) == "a����b"
    assert tokens[1] == VOCAB_SIZE - 1


def test_the_numbers_never_change() -> None:
    # Existing checkpoints depend on these numbers.
    assert VOCAB_SIZE == 98
    assert encode("\n\t aZ~ü").tolist() == [0, 1, 2, 67, 60, 96, 97]
    assert encode("\n\t aZ~").tolist() == [0, 1, 2, 67, 60, 96]
