"""Two peers train one model together: the kinds of models and settings of torch that users come with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.peer.pair import Pair


@pytest.fixture
def defaults() -> Iterator[None]:
    """What tests set for all of torch does not outlive them."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 3))


def train(*models: nn.Module) -> None:
    """One step of SGD of each, towards outputs of 1."""
    for model in models:
        own = next(model.parameters())
        model.zero_grad()
        loss = (model(torch.ones(4, 9, dtype=own.dtype, device=own.device)) - 1).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def rounded(model: nn.Module) -> list[torch.Tensor]:
    """Its weights as peers exchange them."""
    return [parameter.detach().float() for parameter in model.parameters()]


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
@pytest.mark.parametrize("of_weights", [None, torch.float32])
def test_rounds_are_the_same_under_every_default_dtype(dtype: torch.dtype, of_weights: torch.dtype | None) -> None:
    torch.set_default_dtype(dtype)
    models = [linear(seed).to(of_weights or dtype) for seed in range(2)]
    with Pair(models[0]) as pair:
        pair.join(models[1])
        assert all(map(torch.equal, rounded(models[0]), rounded(models[1])))
        hashes = pair.train(lambda: train(*models))
        assert all(ours == theirs for ours, theirs in hashes)
        assert {values.dtype for values in pair.peers[0].anchor_state_dict().values()} == {torch.float32}


@pytest.mark.usefixtures("defaults")
def test_nothing_of_ours_is_made_on_the_default_device() -> None:
    models = [linear(seed) for seed in range(2)]
    torch.set_default_device("meta")
    with Pair(models[0]) as pair:
        pair.join(models[1])
        hashes = pair.train(lambda: train(*models))
        assert all(ours == theirs for ours, theirs in hashes)
        assert all(values.device.type == "cpu" for values in pair.peers[0].anchor_state_dict().values())
