"""What `step()` takes for a loss and a number of samples, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.peer.step_values import MAX_SAMPLES, plain_loss, plain_samples, plain_shard_tokens
from p2ptrain.protocol.rounds.deciding.record import MOST_COUNT


@pytest.mark.parametrize(
    "samples", [8, np.int64(8), np.uint8(8), np.array(8), torch.tensor(8), torch.tensor(8, dtype=torch.uint8)]
)
def test_whole_numbers_of_any_library_are_samples(samples: Any) -> None:
    number = plain_samples(samples)
    assert number == 8
    assert type(number) is int


@pytest.mark.parametrize(
    "samples",
    [
        -1,
        MAX_SAMPLES + 1,
        pytest.param(10**5000, id="5001 digits"),
        8.0,
        np.float32(8),
        torch.tensor(8.5),
        torch.tensor([8, 8]),
        "8",
        None,
        math.nan,
    ],
)
def test_what_is_no_number_of_samples_is_refused_with_what_to_do(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)samples = .*: must be a whole number from 0 to .*; give the tokens"):
        plain_samples(samples)


def test_a_bool_counts_as_python_counts_it() -> None:
    assert [plain_samples(True), plain_samples(False)] == [1, 0]


def test_a_refused_value_is_shown_shortened() -> None:
    with pytest.raises(ConfigError) as refused:
        plain_samples("8" * 100_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("tokens", [0, 8, np.int64(8), torch.tensor(8), MOST_COUNT])
def test_whole_numbers_are_shard_tokens(tokens: Any) -> None:
    number = plain_shard_tokens(tokens)
    assert number == int(tokens)
    assert type(number) is int


@pytest.mark.parametrize(
    "tokens",
    [-1, MOST_COUNT + 1, pytest.param(10**5000, id="5001 digits"), 8.0, np.float32(8), "8", None, math.nan],
)
def test_what_is_no_number_of_shard_tokens_is_refused_with_what_to_do(tokens: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)shard_tokens = .*: must be a whole number from 0 to .*; give the tokens"
    ):
        plain_shard_tokens(tokens)


@pytest.mark.parametrize(
    "loss",
    [1, 1.0, np.float32(1), np.float64(1), np.array(1.0), torch.tensor(1.0), torch.tensor([1.0], requires_grad=True)],
)
@pytest.mark.filterwarnings("error")
def test_numbers_of_any_library_are_losses(loss: Any) -> None:
    number = plain_loss(loss)
    assert number == 1.0
    assert type(number) is float


def test_a_loss_may_be_missing_and_may_have_diverged() -> None:
    assert plain_loss(None) is None
    assert plain_loss(torch.tensor(math.inf)) == math.inf
    assert math.isnan(plain_loss(np.float32("nan")) or 0.0)


@pytest.mark.parametrize("loss", ["1.0", b"1", torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), {}, 1j])
def test_what_is_no_loss_is_refused_with_what_to_do(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)loss = .*: must be one number, or None; give loss\.item\(\)"):
        plain_loss(loss)
