"""The inner Adam's moments and the parameters as one flat vector: reading and writing it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from p2ptrain.algorithms.indexspace import IndexSpace, apply_changes
from p2ptrain.algorithms.moments import MomentView
from p2ptrain.errors import ConfigError

SHAPES = [("matrix", (3, 30)), ("bias", (5,))]
SPACE = IndexSpace(SHAPES)


def make(*, steps: int = 0, seed: int = 0) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW, MomentView]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _, shape in SHAPES]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95))
    for _ in range(steps):
        train(parameters, optimizer)
    return parameters, optimizer, MomentView(SPACE, parameters, optimizer)


def train(parameters: list[torch.nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    sum((parameter**2).sum() for parameter in parameters).backward()
    optimizer.step()
    optimizer.zero_grad()


def read(view: MomentView) -> torch.Tensor:
    flat = torch.full((view.space.num_blocks, 64), 7.0)
    view.read(flat)
    return flat


def change(view: MomentView, flat: torch.Tensor, *, adds: bool) -> None:
    apply_changes(deque(view.changes(flat, adds=adds)))


def test_the_parameters_come_first_as_in_their_own_space() -> None:
    parameters, optimizer, view = make(steps=3)
    flat = read(view).view(-1)
    assert view.space.num_blocks == 3 * SPACE.num_blocks + 1
    assert view.space.tensor_starts[: len(SHAPES)].tolist() == SPACE.tensor_starts[:-1].tolist()
    assert torch.equal(flat[:90], parameters[0].detach().view(-1))
    assert torch.equal(flat[128:133], parameters[1].detach())
    assert torch.equal(flat[192:282], optimizer.state[parameters[0]]["exp_avg"].view(-1))
    assert torch.equal(flat[384:474], optimizer.state[parameters[0]]["exp_avg_sq"].view(-1))
    assert flat[576] == 3
    assert not flat[577:].any()


@pytest.mark.parametrize("steps", [0, 2], ids=["before its first step", "under way"])
def test_who_is_written_to_goes_on_exactly_as_the_other(steps: int) -> None:
    theirs, their_optimizer, their_view = make(steps=5, seed=1)
    ours, our_optimizer, our_view = make(steps=steps, seed=2)
    change(our_view, read(their_view), adds=False)
    for _ in range(3):
        train(theirs, their_optimizer)
        train(ours, our_optimizer)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_adding_adds_to_the_parameters_and_sets_the_moments() -> None:
    parameters, optimizer, view = make(steps=2)
    before = [parameter.detach().clone() for parameter in parameters]
    added = torch.full((view.space.num_blocks, 64), 0.5)
    added.view(-1)[384] = -1e-9  # the first value of exp_avg_sq
    change(view, added, adds=True)
    for parameter, was in zip(parameters, before, strict=True):
        assert torch.equal(parameter, was + 0.5)
        assert (optimizer.state[parameter]["exp_avg"] == 0.5).all()
    squares = optimizer.state[parameters[0]]["exp_avg_sq"].view(-1)
    assert squares[0] == 0
    assert (squares[1:] == 0.5).all()


def test_an_optimizer_may_load_its_state_later() -> None:
    parameters, optimizer, view = make(steps=1)
    _, saved, _ = make(steps=4)
    optimizer.load_state_dict(saved.state_dict())
    assert read(view).view(-1)[576] == 4
    change(view, torch.zeros(view.space.num_blocks, 64), adds=False)
    assert not optimizer.state[parameters[0]]["exp_avg"].any()


def test_moments_are_created_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam takes a state that has anything for one that has everything."""
    parameters, optimizer, view = make(steps=0)
    zeros_like, calls = torch.zeros_like, iter([True, False])

    def short_of_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls):
            return zeros_like(*args, **kwargs)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(torch, "zeros_like", short_of_memory)
        read(view)
    train(parameters, optimizer)
    assert optimizer.state[parameters[0]]["step"] == 1


def test_what_has_no_such_moments_is_refused() -> None:
    parameters, _, _ = make()
    for optimizer, message in (
        (None, "given is no optimizer; pass join"),
        (torch.optim.SGD(parameters, lr=0.1), "given is SGD"),
        (torch.optim.Adam(parameters, lr=0.1, amsgrad=True), "third moment"),
        (torch.optim.Adam(parameters[:1], lr=0.1), "does not train parameter bias"),
    ):
        with pytest.raises(ConfigError, match=message):
            MomentView(SPACE, parameters, optimizer)
