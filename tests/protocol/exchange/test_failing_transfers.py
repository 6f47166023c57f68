"""A device without memory: an error costs a fragment, or one attempt of a snapshot or landing, and never the step."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trio

from p2ptrain.algorithms import indexspace
from p2ptrain.algorithms.indexspace import ParameterView
from p2ptrain.algorithms.mixing import Mixing
from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.exchange.types import (
    Epoch,
    Landing,
    LandingDone,
    Push,
    PushBegun,
    Snapshot,
    SnapshotTaken,
    SnapshotWanted,
)
from tests import side_stream
from tests.protocol.exchange.test_delayed_transfers import Story
from tests.protocol.exchange.test_exchange import SPACE, Bench, landing, push_plan
from tests.protocol.hearing import hear
from tests.protocol.swarm import RUN, common, run_virtual, start_all, swarm
from tests.side_stream import LateStream

NUM_BLOCKS = SPACE.num_blocks


class ShortStream(LateStream):
    """A device whose memory does not suffice for work, whenever `is_short` says so."""

    def __init__(self, is_short: Callable[[], bool], polls: Callable[[], int] = lambda: 0) -> None:
        super().__init__(polls)
        self.is_short = is_short

    def run(self, *args: Any, **kwargs: Any) -> Any:
        out_of_memory(self.is_short())
        return super().run(*args, **kwargs)


def out_of_memory(is_short: bool) -> None:
    if is_short:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")


@contextmanager
def failing(owner: Any, name: str, *, after: int = 0, error: type[Exception] = torch.cuda.OutOfMemoryError) -> Any:
    """Let all calls of a function fail in a block, after the first few."""
    works, calls, over = getattr(owner, name), itertools.count(), False

    def fails(*args: Any, **kwargs: Any) -> Any:
        if over or next(calls) < after:
            return works(*args, **kwargs)
        raise error("CUDA out of memory")

    setattr(owner, name, fails)
    try:
        yield
    finally:
        over = True
        setattr(owner, name, works)


@pytest.fixture(params=["on a device", "without room", "on a CPU"])
def bench(request: pytest.FixtureRequest) -> Bench:
    side = None if request.param == "on a CPU" else LateStream()
    if side is not None:
        side.room = request.param == "on a device"
    bench = Bench(side=side)
    bench.steps(2)
    return bench


def test_a_push_that_cannot_be_gathered_is_not_sent(bench: Bench) -> None:
    pushes, began = list[Push](), list[float]()
    hear(bench.exchange, {Push: pushes.append, PushBegun: began.append})
    with failing(ParameterView, "gather_on_device"):
        bench.exchange.offer_push(push_plan(3))
        assert bench.step().sent == 0
    bench.exchange.offer_push(push_plan(4))
    assert bench.step().sent == 1
    bench.deliver_posts()
    assert [push.plan.plan.blocks.tolist() for push in pushes] == [[4]]
    assert len(began) == 2  # so that another one is planned


def test_a_fragment_that_cannot_be_compared_is_skipped(bench: Bench) -> None:
    before = bench.flat()
    bench.receive("b")
    with failing(ParameterView, "gather_on_device"), failing(Mixing, "_squares"):
        report = bench.step()
    assert (report.merged, report.skipped) == (0, {"failed": 1})
    assert torch.equal(bench.flat(), before)
    bench.receive("b")
    assert bench.step().merged == 1


def test_the_blocks_of_a_fragment_that_failed_while_it_was_mixed_may_have_changed(bench: Bench) -> None:
    """The processes of a group copy the weights that may have changed from rank 0."""
    bench.receive("b", blocks=(2, 7))
    with failing(ParameterView, "scatter_on_device"), failing(Mixing, "mix"):
        report = bench.step()
    assert (report.merged, report.skipped) == (0, {"failed": 1})
    assert bench.exchange.take_changes().blocks.tolist() == [2, 7]


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_snapshot_that_fails_is_taken_at_the_next_step_if_it_is_still_wanted(bench: Bench, withdrawn: bool) -> None:
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(NUM_BLOCKS, 64), latest_s=0.0))
    with failing(ParameterView, "copies"):
        bench.steps(2)
    if withdrawn:
        bench.exchange.want_snapshot(None)
    bench.tensors[0].add_(1.0)
    bench.steps(2)
    bench.deliver_posts()
    assert [snapshot.steps for snapshot in taken] == ([] if withdrawn else [5])
    if not withdrawn:
        assert torch.equal(taken[0].weights, bench.flat())


def test_a_snapshot_that_fails_when_it_is_not_wanted_any_more_is_not_taken_again() -> None:
    """Its buffer may have another use by then."""
    bench, buffer = Bench(side=LateStream(lambda: 1)), torch.empty(NUM_BLOCKS, 64)
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=0.0))
    bench.step()
    bench.exchange.want_snapshot(None)
    with failing(side_stream._Queued, "wait"):
        bench.step()
    buffer.fill_(7.0)
    bench.steps(3)
    assert (buffer == 7.0).all()
    assert not bench.exchange.under_way


@pytest.mark.parametrize("kind", ["add", "write"])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_landing_that_fails_goes_on_where_it_stopped(
    bench: Bench, kind: str, changed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the two tensors is changed once, and only then the round is in the weights."""
    told: list[Landing] = []
    hear(bench.exchange, {LandingDone: lambda landed, held_s: told.append(landed)})
    before, buffer = bench.flat(), torch.ones(NUM_BLOCKS, 64)
    buffer[-1, 6:] = 0  # padding
    expected = before + buffer if kind == "add" else buffer
    with failing(indexspace, f"_{kind}", after=changed):
        bench.exchange.land(landing(kind=kind, buffer=buffer))
        bench.step()
        bench.deliver_posts()
        assert (bench.exchange.epoch, bench.exchange.landing_pending, told) == (Epoch("L", 3), True, [])
        assert torch.equal(bench.flat()[:30], expected[:30]) == (changed > 0)
        assert torch.equal(bench.flat()[30:], before[30:])
        assert bench.exchange.take_changes().everything
        assert isinstance(bench.exchange.landing_error, torch.cuda.OutOfMemoryError)
    bench.step()
    bench.deliver_posts()
    assert torch.equal(bench.flat(), expected)
    assert (bench.exchange.epoch, bench.exchange.landing_pending, len(told)) == (Epoch("L", 4), False, 1)
    assert bench.exchange.landing_error is None
    assert bench.exchange.take_changes().everything
    assert caplog.text.count("too little memory on the GPU for landing round 4") == 1


def test_a_landing_that_cannot_begin_begins_at_a_later_step() -> None:
    shortages = iter([True, True, False])
    bench = Bench(side=ShortStream(lambda: next(shortages)))
    before = bench.flat()
    bench.exchange.land(landing(kind="add", buffer=torch.ones(NUM_BLOCKS, 64)))
    for expected in (before, before, before + 1):
        bench.step()
        assert torch.equal(bench.flat()[:30], expected[:30])


def test_each_shortage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(side=ShortStream(lambda: True))
    bench.steps(2)
    for _ in range(3):
        bench.receive("b")
        bench.exchange.offer_push(push_plan(3))
        bench.step()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"too little memory on the GPU for {what}. Use a smaller micro-batch "
        "(CUDA out of memory. Tried to allocate 2.00 GiB.)"
        for what in ("merging a received fragment; it is skipped", "gathering a fragment; it is not sent")
    ]


def test_other_errors_are_contained_too_and_logged_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.steps(2)
    bench.receive("b")
    with failing(Mixing, "mix", error=KeyError):
        assert bench.step().skipped == {"failed": 1}
    assert "merging a received fragment failed; it is skipped: KeyError" in caplog.text
    assert "Traceback" in caplog.text


def test_a_process_of_our_group_that_is_lost_ends_the_step() -> None:
    bench = Bench()
    bench.steps(2)
    bench.receive("b")
    with failing(Mixing, "mix", error=PeerLostError), pytest.raises(PeerLostError):
        bench.step()


@pytest.mark.parametrize("seed", range(2))
def test_with_a_device_that_fails_now_and_then_all_is_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    story = Story(seed, ShortStream(lambda: rng.random() < 0.3, lambda: rng.randrange(3)))
    story.run(200)
    story.bench.exchange._fragments._side.is_short = lambda: False  # type: ignore[attr-defined]
    story.rng.random = lambda: 1.0  # type: ignore[method-assign]
    story.run(20)
    counted = Counter[str]()
    for report in story.reports:
        counted.update(report.skipped)
    assert counted["failed"] > 10
    assert sum(report.merged for report in story.reports) + counted.total() == story.put
    for taken in story.snapshots:
        weights, epoch = story.after[taken.steps]
        assert torch.equal(taken.weights, weights)
        assert taken.epoch == epoch
    assert story.landed == story.handed
    assert min(len(story.pushes), len(story.snapshots), len(story.landed)) > 10


def test_peers_whose_devices_fail_now_and_then_end_with_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, counts = random.Random(0), Counter[bool]()

    def now_and_then(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., None]:
        def changed(tensor: torch.Tensor, values: torch.Tensor) -> None:
            is_short = rng.random() < 0.3
            counts[is_short] += 1
            out_of_memory(is_short)
            change(tensor, values)

        return changed

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=70)) as s:
            s.devices_fail = True
            s.sides = {name: ShortStream(lambda: rng.random() < 0.3, lambda: rng.randrange(3)) for name in "ab"}
            start_all(s, "abc")
            await s.until(lambda: all(peer.exchange.finished for peer in s.peers.values()))
            await trio.sleep(2)
            for peer in s.peers.values():
                assert torch.equal(peer.flat(), peer.node.state.anchor_tensor())
                assert torch.equal(peer.flat(), s.peers["a"].flat())
            assert common(s, 2, 3)
            assert min(counts.values()) > 5

    monkeypatch.setattr(indexspace, "_add", now_and_then(indexspace._add))
    monkeypatch.setattr(indexspace, "_write", now_and_then(indexspace._write))
    run_virtual(main)
