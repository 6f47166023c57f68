"""One kind of model, and what it must do: two peers train it together, each on data of its own, or `join` refuses it.

They join, take steps, and average in one round, the last of a run. The peers are real ones, over a memory network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import p2ptrain
from p2ptrain.errors import ConfigError
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.settings.config import RunConfig
from tests.peer.pair import DEADLINE_S, Pair

STEPS = 3
ATTEMPTS = 3
# The last round is a plain average, so that the weights in the end are known. Fragments are exchanged meanwhile.
# Without the guard: of a handful of weights, a peer's outer gradient may by chance be three times the other's.
RUN = RunConfig(
    run_id="models", sync_every=STEPS, total_steps=STEPS, fragment_fraction=0.1, round_codec="none",
    round_guard="off",
)  # fmt: skip
NOTHING_TO_TRAIN = "the model has no parameter with requires_grad=True: there is nothing to train"
LOOK_S = 0.01

Weights = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A kind of model.

    Attributes:
        name: for the table.
        build: makes one, with random weights. What is frozen must be the same in all.
        loss: draws a batch at random, and returns the loss on it, a scalar.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]


def train_together(case: Case, tell: Callable[[str, object], None]) -> Pair:
    """Two peers join with the model, train, and end with the mean of their weights, equal bit for bit.

    Where a busy machine makes a peer so late that the round does without it, they begin again.

    Args:
        tell: `record_property` of the test; it gets the line of the table.

    Returns:
        The peers, which have left.
    """
    for seed in range(ATTEMPTS):
        models = []
        for peer in range(2):
            torch.manual_seed(2 * seed + peer)
            models.append(case.build().train())
        pair, began, trained, anchor = _run(case, models)
        means = [torch.stack(both).double().mean(0) for both in zip(*trained, strict=True)]
        is_mean = _close(anchor, means)
        if is_mean or not any(_close(anchor, own) for own in trained):
            break
    assert is_mean, "the anchor is not the mean of both peers' weights"
    for model, who in zip(models, ("founder", "joiner"), strict=True):
        assert all(map(torch.equal, _weights(model), anchor)), f"the weights of the {who} are not the anchor"
    assert not all(map(torch.equal, anchor, began)), "no weight has moved"
    tell("shown", line(case.name, sum(map(torch.numel, began)), "trained"))
    return pair


def _run(case: Case, models: list[nn.Module]) -> tuple[Pair, Weights, list[Weights], Weights]:
    """Return the peers, the weights that both begin with, those of each before the round, and the anchor after it."""
    with Pair(models[0], run=RUN) as pair:
        pair.join(models[1])
        began, joined = map(_weights, models)
        assert began
        assert all(map(torch.equal, began, joined)), "the joiner has other weights than the founder"
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(STEPS):
            # Data differ, as both draw from one generator. Both peers are at the same step when the round begins.
            losses = [_train(case, *own) for own in zip(models, optimizers, strict=True)]
            for peer, loss in zip(pair.peers, losses, strict=True):
                peer.step(loss=loss.item(), samples=1)
        trained = list(map(_weights, models))
        assert not all(map(torch.equal, *trained)), "both have trained the same"
        _wait_finished(pair)
        anchors = [peer.anchor_state_dict() for peer in pair.peers]  # waits until the round's hash is known
        assert pair.peers[0].anchor_hash == pair.peers[1].anchor_hash
    assert anchors[0].keys() == anchors[1].keys()
    for name, anchor in anchors[0].items():
        assert torch.equal(anchor, anchors[1][name]), f"{name} differs between the peers"
    return pair, began, trained, list(anchors[0].values())


def _close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(first.double(), second.double(), rtol=1e-5, atol=1e-6) for first, second in pairs)


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = case.loss(model)
    assert loss.isfinite(), f"loss {loss}"
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def refuse(name: str, model: nn.Module, text: str) -> None:
    """`join` refuses the model, before it opens a network, with a text that begins like this."""
    with pytest.raises(ConfigError) as refusal:
        p2ptrain.join(model)
    assert str(refusal.value).startswith(text), name


def line(name: str, parameters: int, outcome: str) -> str:
    """A line of the table: the name, how many values are exchanged, and what became of it."""
    return f"{name:<40}{parameters:>9,}  {outcome}"


def _weights(model: nn.Module) -> Weights:
    """Copies of what is exchanged, as it is exchanged."""
    return [tensor.detach().clone().float() for tensor in ModelParts(model).parameters]


def _wait_finished(pair: Pair) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(peer.finished for peer in pair.peers):
        assert time.monotonic() < deadline, [(peer.status, peer.run_step, peer.failure) for peer in pair.peers]
        for peer in pair.peers:
            peer.wait_finished(LOOK_S)
