"""Transfers on a device have the bits of those on a CPU and of the moment at which they began, and wait for nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BlockPlan, IndexSpace, ParameterView
from p2ptrain.algorithms.transfers import Transfer, Transfers, at_once
from p2ptrain.peer.device_transfers import device_transfers
from p2ptrain.peer.side_stream import SideStream
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import (
    Arrival,
    Epoch,
    Landing,
    LandingDone,
    Push,
    PushPlan,
    Snapshot,
    SnapshotTaken,
    SnapshotWanted,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.hearing import hear
from tests.side_stream import LateStream, bits

# Full blocks, a short tail, a scalar, nothing at all, less than a block; and one that is not contiguous.
SHAPES = [(40, 64), (5, 13), (), (0, 7), (3,), (33, 30)]
SPACE = IndexSpace([(f"t{i}", shape) for i, shape in enumerate(SHAPES)])
PLAN = SPACE.plan(np.arange(SPACE.num_blocks)[::-2])


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Pair:
    """Equal weights on the CPU, as a reference, and on the device."""

    def __init__(self, side: SideStream, dtype: torch.dtype) -> None:
        on_cpu = [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]
        on_cpu[-1] = on_cpu[-1].t().contiguous().t()
        self.tensors = [tensor.clone().to(side.device) for tensor in on_cpu]
        self.cpu = at_once(ParameterView(SPACE, on_cpu))
        self.device = device_transfers(ParameterView(SPACE, self.tensors), side)
        self._all = [*on_cpu, *self.tensors]

    def both(self, call: Callable[[Transfers], Any]) -> tuple[Any, Any]:
        """The results of a transfer on both. Between its beginning and its end, training changes the weights."""
        begun = [call(self.cpu), call(self.device)]
        self.train()
        ours, theirs = (finished(transfer) for transfer in begun)
        return ours, theirs

    def train(self) -> None:
        for tensor in self._all:
            tensor.mul_(0.5).add_(1.0)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        flats = [torch.zeros(SPACE.num_blocks, BLOCK) for _ in range(2)]
        for transfers, flat in zip((self.cpu, self.device), flats, strict=True):
            finished(transfers.flat.read(flat))
        return flats[0], flats[1]

    def check_equal(self) -> None:
        ours, theirs = self.weights()
        assert torch.equal(bits(ours), bits(theirs))


def finished(transfer: Transfer[Any]) -> Any:
    """Poll until it is done, as steps do, and finish it."""
    while not transfer.done:
        pass
    return transfer.finish()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pair(side: SideStream, request: pytest.FixtureRequest) -> Pair:
    return Pair(side, request.param)


def test_blocks_and_snapshots_are_of_the_moment_at_which_they_began(pair: Pair) -> None:
    ours, theirs = pair.both(lambda transfers: transfers.fragments.gather(PLAN))
    assert torch.equal(ours, theirs)
    assert theirs.device.type == "cpu"
    outs = [torch.full((SPACE.num_blocks, BLOCK), 7.0), pair.device.flat.buffer()]
    unused = iter(outs)
    pair.both(lambda transfers: transfers.flat.read(next(unused)))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], pair.weights()[0])  # training has gone on


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("room", [True, False])
def test_a_landing_changes_the_weights_when_it_is_finished(
    pair: Pair, side: SideStream, adds: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "try_reserve", lambda size_bytes: room)
    pointers = [tensor.data_ptr() for tensor in pair.tensors]
    flat = pair.device.flat.buffer().copy_(randn(SPACE.num_blocks, BLOCK, seed=9))
    before = pair.weights()[1]
    landing = pair.device.flat.land(flat, adds=adds)
    assert torch.equal(pair.weights()[1], before)
    finished(landing)
    finished(pair.cpu.flat.land(flat, adds=adds))
    pair.check_equal()
    assert not torch.equal(pair.weights()[1], before)
    assert [tensor.data_ptr() for tensor in pair.tensors] == pointers


@pytest.mark.parametrize("weight", [0.5, "of each block"])
def test_a_fragment_is_mixed_into_the_weights_of_the_moment(pair: Pair, weight: float | str) -> None:
    """Bit for bit with weight ½. With others a GPU may round once less, as it multiplies and adds in one operation."""
    weights = torch.linspace(0.2, 0.5, len(PLAN.blocks))[:, None] if isinstance(weight, str) else weight
    received = finished(pair.cpu.fragments.gather(PLAN)) + 0.01 * randn(len(PLAN.blocks), BLOCK, seed=3)
    at_cpu, on_device = (finished(t.fragments.compare(PLAN, received)) for t in (pair.cpu, pair.device))
    assert on_device.own_rms == pytest.approx(at_cpu.own_rms, rel=1e-5)
    limit = 1.1 * on_device.mix(weights, max_rms=0.0)  # too far: nothing has changed
    pair.check_equal()
    assert limit == pytest.approx(1.1 * at_cpu.mix(weights, max_rms=0.0), rel=1e-5)
    again = finished(pair.device.fragments.compare(PLAN, received))
    pair.train()
    finished(pair.cpu.fragments.compare(PLAN, received)).mix(weights, math.inf)
    assert again.mix(weights, limit) < limit  # as it was when they were compared
    ours, theirs = pair.weights()
    if isinstance(weight, str):
        rounding = 1e-2 if pair.tensors[0].dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=1e-7)
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_mixed(pair: Pair, value: float) -> None:
    received = torch.full((len(PLAN.blocks), BLOCK), value)
    assert not math.isfinite(finished(pair.device.fragments.compare(PLAN, received)).mix(0.5, max_rms=math.inf))
    pair.check_equal()


# --- steps ---------------------------------------------------------------------------------------------------------


@contextmanager
def no_waiting(side: SideStream) -> Iterator[None]:
    """Fail if the training thread waits for the device."""
    if isinstance(side, LateStream):
        waited = side.waited
        yield
        assert side.waited == waited
    else:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_never_waits_for_the_device(side: SideStream) -> None:
    """Pushes, fragments, a snapshot and a landing of each kind, all in the same steps."""
    tensors = [randn(*shape, seed=i).to(side.device) for i, shape in enumerate(SHAPES)]
    view, now, posts = ParameterView(SPACE, tensors), iter(range(10**6)), list[Callable[[], object]]()
    run = RunConfig(fragment_fraction=0.1, sync_every=10, total_steps=0)
    exchange = Exchange(
        view, run, transfers=device_transfers(view, side), clock=lambda: 0.01 * next(now), post=posts.append
    )
    exchange.epoch = Epoch("L", 0)
    pushes, snapshots, landed = list[Push](), list[Snapshot](), list[Landing]()
    hear(exchange, {Push: pushes.append, SnapshotTaken: snapshots.append})
    hear(exchange, {LandingDone: lambda landing, held_s: landed.append(landing)})
    received = exchange.pin(view.gather(PLAN) + 0.01)
    merged = 0
    for step in range(60):
        if step % 20 == 5:
            kind: Any = "write" if step == 25 else "add"
            flat = exchange.new_buffer().copy_(0.01 * randn(SPACE.num_blocks, BLOCK, seed=step))
            exchange.land(Landing(kind, flat, Epoch("L", len(landed) + 1), 10, step, 0, None, None, False))
        if step % 20 == 10:
            exchange.want_snapshot(SnapshotWanted(exchange.new_buffer(), latest_s=0.0))
        exchange.offer_push(PushPlan(0, 0, 1, PLAN))
        for sender in "bc":
            exchange.inbox.put(Arrival(sender, exchange.epoch, PLAN, received, 0.0, arrived_s=1e9))
        for tensor in tensors:
            tensor.mul_(0.999)
        with no_waiting(side):
            merged += exchange.step(1).merged
        if not isinstance(side, LateStream):
            torch.cuda.synchronize()  # as a loop that reads its loss
        for post in posts:
            post()
        posts.clear()
    assert [landing.kind for landing in landed] == ["add", "write", "add"]
    assert len(snapshots) == 3
    assert len(pushes) > 15
    assert merged > 15
    assert all(snapshot.weights.isfinite().all() for snapshot in snapshots)


def test_the_plan_of_a_fragment_is_not_changed(side: SideStream) -> None:
    """Threads share it."""
    pair, plan = Pair(side, torch.float32), copy.deepcopy(PLAN)
    finished(pair.device.fragments.gather(plan))
    assert isinstance(plan, BlockPlan)
    assert torch.equal(plan.index, PLAN.index)
    assert plan.index.device.type == "cpu"
