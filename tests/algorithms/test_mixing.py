"""Mixing received blocks into live weights: what is measured, what is mixed, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.mixing import Mixing
from tests.algorithms.test_indexspace import SHAPES, flatten, make_tensors, make_view, randn, some_plan


def test_mixing_measures_the_difference_and_mixes_below_the_limit() -> None:
    clipped, plain = make_view(make_tensors()), make_view(make_tensors())
    plan = some_plan(clipped)
    own, received = clipped.gather(plan), randn(plan)
    mask = flatten([torch.ones(shape) for shape in SHAPES])[plan.blocks].bool()
    expected = float((received - own)[mask].double().square().mean().sqrt())
    assert Mixing(clipped, plan, received).own_rms == pytest.approx(float(own[mask].double().square().mean().sqrt()))
    assert Mixing(clipped, plan, received).mix(0.5, expected * 1.01) == pytest.approx(expected)
    Mixing(plain, plan, received).mix(0.5, math.inf)
    assert torch.equal(clipped.gather(plan), plain.gather(plan))
    torch.testing.assert_close(clipped.gather(plan), mask * (own + received) / 2)


@pytest.mark.parametrize(
    ("poison", "max_rms"),
    [(0.0, 1e-3), (torch.nan, math.inf), (torch.inf, math.inf), (-torch.inf, 1e9), (3e38, math.inf)],
)
def test_mixing_changes_nothing_beyond_the_limit(poison: float, max_rms: float) -> None:
    """3e38 is finite, but its square is not, so the difference has no finite rms and is not mixed."""
    tensors = make_tensors()
    view = make_view(tensors)
    plan = some_plan(view)
    before, received = flatten(tensors), randn(plan)
    received[1, 3] += poison
    rms = Mixing(view, plan, received).mix(0.5, max_rms)
    assert rms > max_rms or not math.isfinite(rms)
    assert torch.equal(flatten(tensors), before)


def test_padding_is_neither_measured_nor_written() -> None:
    clean, dirty = make_view(make_tensors()), make_view(make_tensors())
    plan = clean.space.plan(np.arange(clean.space.num_blocks))
    received = randn(plan)
    padding = flatten([torch.ones(shape) for shape in SHAPES]) == 0
    spoilt = received.masked_fill(padding, 1e6)
    assert Mixing(dirty, plan, spoilt).mix(0.5, math.inf) == pytest.approx(
        Mixing(clean, plan, received).mix(0.5, math.inf)
    )
    assert torch.equal(dirty.gather(plan), clean.gather(plan))
    assert torch.equal(dirty.gather(plan)[padding], torch.zeros(int(padding.sum())))


@pytest.mark.parametrize(
    "received",
    [
        torch.zeros(1, BLOCK),
        torch.zeros(2, BLOCK, dtype=torch.bfloat16),
        torch.zeros(2, BLOCK, device="meta"),
        torch.zeros(2, 2 * BLOCK)[:, ::2],
        torch._neg_view(torch.zeros(2, BLOCK)),
    ],
    ids=["fewer rows", "another dtype", "no memory", "apart", "negated when read"],
)
def test_rows_that_do_not_lie_in_memory_as_they_read_are_refused(received: torch.Tensor) -> None:
    view = make_view([torch.zeros(4, BLOCK)])
    with pytest.raises(ValueError, match="float32, contiguous"):
        Mixing(view, view.space.plan([1, 2]), received)


@pytest.mark.parametrize(
    "weight", [torch.full((1, 1), 0.25).expand(4, 1), torch.full((8, 1), 0.25)[::2], torch.full((4, 1), 0.25).double()]
)
def test_weights_may_lie_anyhow(weight: torch.Tensor) -> None:
    tensors = [torch.zeros(4, BLOCK)]
    view = make_view(tensors)
    Mixing(view, view.space.plan(range(4)), torch.ones(4, BLOCK)).mix(weight, math.inf)
    assert torch.equal(tensors[0], torch.full((4, BLOCK), 0.25))


def test_a_limit_that_is_not_a_number_mixes_nothing() -> None:
    tensors = [torch.zeros(4, BLOCK)]
    view = make_view(tensors)
    Mixing(view, view.space.plan([1]), torch.ones(1, BLOCK)).mix(0.5, math.nan)
    assert not tensors[0].any()


def test_padding_that_is_not_zero_costs_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender may fill all of it, in each fragment."""
    view = make_view([torch.zeros(70) for _ in range(50)])
    plan = view.space.plan(range(view.space.num_blocks))
    received, clone, copies = torch.ones(len(plan.blocks), BLOCK), torch.Tensor.clone, list[int]()
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copies.append(tensor.numel()) or clone(tensor))
    Mixing(view, plan, received).mix(1.0, math.inf)
    assert copies == [received.numel()]
    assert all(torch.equal(tensor, torch.ones(70)) for tensor in view.tensors)
