"""Snapshots and landings in slices over several steps: what each holds, what happens meanwhile, and that none is lost.

The benches' pieces are a block each and take 10 ms of their clock; a step takes 100 ms, so 5 pieces are half a step.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trio

from p2ptrain.algorithms import indexspace
from p2ptrain.algorithms.indexspace import ParameterView
from p2ptrain.algorithms.transfers import Pieces, Transfer, Transfers, in_pieces
from p2ptrain.peer.side_stream import SideStream
from p2ptrain.protocol.exchange import slices
from p2ptrain.protocol.exchange.slices import SHARE
from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingDone, Push, Snapshot, SnapshotTaken, SnapshotWanted
from tests.protocol.exchange.test_exchange import SPACE, STEP_S, Bench, landing, push_plan
from tests.protocol.hearing import hear
from tests.protocol.swarm import RUN, Witness, common, run_virtual, start_all, swarm

NUM_BLOCKS = SPACE.num_blocks
PIECE_S = 0.01


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexspace, "_PIECE_VALUES", 64)


class SlowBench(Bench):
    """A bench whose pieces take time on its clock, and fail whenever `fails` says so.

    Attributes:
        snapshots, landed: what the node was told of.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.fails: Callable[[], bool] = lambda: False
        self.snapshots: list[Snapshot] = []
        self.landed: list[Landing] = []
        super().__init__(**kwargs)
        hear(self.exchange, {SnapshotTaken: self.snapshots.append})
        hear(self.exchange, {LandingDone: lambda landed, held_s: self.landed.append(landed)})
        self.steps(2)

    def transfers(self, view: ParameterView, side: SideStream | None) -> Transfers:
        plain, bench = in_pieces(view), self

        class Slow:
            def __init__(self, pieces: Transfer[None]) -> None:
                self._pieces = pieces
                self.done, self.finish = True, pieces.finish

            def advance(self) -> bool:
                bench.now += PIECE_S
                if bench.fails():
                    raise ValueError("a piece failed")
                return self._pieces.advance()

        class SlowFlat:
            pins = False
            buffer = plain.flat.buffer

            def read(self, out: torch.Tensor) -> Slow:
                return Slow(plain.flat.read(out))

            def land(self, flat: torch.Tensor, *, adds: bool) -> Slow:
                return Slow(plain.flat.land(flat, adds=adds))

        return Transfers(plain.fragments, SlowFlat(), plain.section)

    def step(self, samples: int = 16, *, took_s: float = STEP_S) -> Any:
        report = super().step(samples, took_s=took_s)
        self.deliver_posts()
        return report

    def want(self, **changes: Any) -> SnapshotWanted:
        wanted = SnapshotWanted(torch.full((NUM_BLOCKS, 64), torch.nan), latest_s=0.0, **changes)
        self.exchange.want_snapshot(wanted)
        return wanted

    def land(self, kind: str = "add", **changes: Any) -> torch.Tensor:
        """Set a landing of whole numbers, which add up without rounding. Returns its buffer."""
        buffer = torch.arange(NUM_BLOCKS * 64.0).view(NUM_BLOCKS, 64)
        buffer[-1, 6:] = 0  # padding
        self.exchange.land(landing(kind=kind, buffer=buffer, **changes))
        return buffer

    def integers(self) -> torch.Tensor:
        """Set the weights to whole numbers."""
        for tensor in self.tensors:
            tensor.round_()
        return self.flat()

    def train(self) -> None:
        for tensor in self.tensors:
            tensor.add_(1.0)


def ones() -> torch.Tensor:
    """What a training step of `SlowBench.train` adds."""
    values = torch.ones(NUM_BLOCKS, 64)
    values[-1, 6:] = 0
    return values


def until(bench: SlowBench, condition: Callable[[], bool]) -> Iterator[Any]:
    """Steps until a condition holds: their reports."""
    while not condition():
        yield bench.step()
        assert len(bench.posted) < 100


@pytest.mark.parametrize("kind", ["add", "write"])
def test_slices_have_the_bits_of_one_slice(kind: str) -> None:
    whole, bench = Bench(), SlowBench()
    whole.steps(2)
    taken = list[Snapshot]()
    hear(whole.exchange, {SnapshotTaken: taken.append})
    whole.exchange.want_snapshot(SnapshotWanted(torch.full((NUM_BLOCKS, 64), torch.nan), latest_s=0.0))
    buffer = torch.randn(NUM_BLOCKS, 64, generator=torch.Generator().manual_seed(1))
    whole.exchange.land(landing(kind=kind, buffer=buffer.clone()))
    whole.step()
    whole.deliver_posts()
    bench.exchange.land(landing(kind=kind, buffer=buffer.clone()))
    bench.want()
    assert len(list(until(bench, lambda: bool(bench.snapshots)))) > 10
    assert torch.equal(bench.flat(), whole.flat())
    assert torch.equal(bench.snapshots[0].weights, taken[0].weights)
    assert bench.snapshots[0].epoch == taken[0].epoch == Epoch("L", 4)


def test_no_step_is_held_for_more_than_half_of_its_usual_length() -> None:
    """Nor for much less: all is done after a few steps."""
    bench = SlowBench()
    bench.want()
    reports = list(until(bench, lambda: bool(bench.snapshots)))
    bench.land()
    reports += until(bench, lambda: bool(bench.landed))
    assert max(report.exchange_s for report in reports) <= 0.5 * STEP_S
    assert sum(report.exchange_s for report in reports) >= 2 * NUM_BLOCKS * PIECE_S
    assert len(reports) <= 2 * NUM_BLOCKS * PIECE_S / (SHARE * STEP_S) + 2
    assert bench.snapshots[0].held_s == pytest.approx((NUM_BLOCKS + 1) * PIECE_S)  # one for the padding


def test_what_takes_little_time_is_done_in_one_step_also_if_the_length_of_steps_is_not_known() -> None:
    bench = Bench()
    taken = list[Snapshot]()
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.exchange.land(landing(kind="add", buffer=torch.ones(NUM_BLOCKS, 64)))
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(NUM_BLOCKS, 64), latest_s=0.0))
    bench.step()
    bench.deliver_posts()
    assert bench.exchange.step_s == 0.0
    assert not bench.exchange.landing_pending
    assert [snapshot.steps for snapshot in taken] == [1]


def test_a_block_of_a_snapshot_is_of_the_step_that_copied_it_and_its_position_of_the_first() -> None:
    bench = SlowBench()
    before = bench.integers()
    bench.want()
    steps, tokens = bench.exchange.steps + 1, bench.exchange.tokens + 16
    count = 0
    while not bench.snapshots:
        bench.train()
        bench.step()
        count += 1
    (snapshot,) = bench.snapshots
    assert (snapshot.steps, snapshot.tokens, snapshot.epoch) == (steps, tokens, Epoch("L", 3))
    learned = (snapshot.weights - before)[:, 0]
    assert torch.equal(snapshot.weights - before, learned[:, None] * ones())
    assert learned.tolist() == sorted(learned.tolist())
    assert set(learned.tolist()) == {float(n) for n in range(1, count + 1)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("how", ["steps", "leaving"])
def test_each_block_lands_once_also_if_pieces_fail(
    how: str, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, rng, add = SlowBench(), random.Random(seed), indexspace._add

    def fails_now_and_then(tensor: torch.Tensor, values: torch.Tensor) -> None:
        if rng.random() < 0.2:
            raise ValueError("a piece failed")
        add(tensor, values)

    monkeypatch.setattr(indexspace, "_add", fails_now_and_then)
    before, trained = bench.integers(), 0
    buffer = bench.land()
    while not bench.landed:
        if how == "steps" or trained < 4:
            bench.train()
            trained += 1
            bench.step()
        else:
            bench.exchange.idle()
            bench.deliver_posts()
            assert bench.landed or bench.exchange.under_way
    assert torch.equal(bench.flat(), before + buffer + trained * ones())
    assert len(bench.landed) == 1
    assert not bench.exchange.under_way
    assert bench.exchange.landing_error is None
    assert "landing round 4 failed; it is tried again at each step" in caplog.text


def test_a_snapshot_of_which_a_piece_failed_is_taken_from_its_start() -> None:
    bench = SlowBench()
    bench.want()
    bench.step()
    bench.fails = lambda: True
    bench.step()
    bench.fails = lambda: False
    bench.train()
    list(until(bench, lambda: bool(bench.snapshots)))
    assert bench.snapshots[0].steps == 5
    assert torch.equal(bench.snapshots[0].weights, bench.flat())


def test_epoch_position_and_tokens_change_with_the_last_slice() -> None:
    bench = SlowBench()
    steps = bench.exchange.steps
    bench.land(included_tokens=20, snapshot_steps=steps, run_step=77)
    seen = []
    for _ in until(bench, lambda: bool(bench.landed)):
        exchange = bench.exchange
        assert exchange.take_changes().everything
        assert (exchange.steps, len(bench.landed)) == (steps + len(seen) + 1, not exchange.landing_pending)
        seen.append((exchange.landing_pending, exchange.epoch.round, exchange.run_step >= 77, exchange.tokens))
    count = len(seen)
    assert count > 5
    tokens = [16 * (2 + n) for n in range(1, count + 1)]
    assert seen == [(True, 3, False, tokens[n]) for n in range(count - 1)] + [(False, 4, True, tokens[-1] - 20)]
    # The interval counts from the step of the snapshot.
    assert bench.exchange.of_interval == pytest.approx(count / 10)


def test_while_a_round_lands_no_fragment_is_merged_and_none_is_pushed() -> None:
    """One of the epoch before would move what has landed back; one of the next, what has not landed twice."""
    bench, pushes = SlowBench(fragment_fraction=0.005), list[Push]()
    hear(bench.exchange, {Push: pushes.append})
    landed = bench.flat() + bench.land()
    bench.step()
    bench.receive("b", blocks=(1,))
    bench.receive("c", blocks=(30,), values=landed[30:31] + 0.01, epoch=Epoch("L", 4))
    bench.exchange.offer_push(push_plan(3))
    *during, last = until(bench, lambda: bool(bench.landed))
    assert len(during) > 3
    assert {(report.merged, report.sent, len(report.skipped)) for report in during} == {(0, 0, 0)}
    assert (last.merged, last.sent, last.skipped) == (1, 1, {"epoch": 1})
    assert [push.epoch for push in pushes] == [Epoch("L", 4)]


def test_no_fragment_is_merged_after_a_piece_of_the_first_slice_failed() -> None:
    bench, works = SlowBench(fragment_fraction=0.005), iter((True, True))
    bench.fails = lambda: not next(works, False)
    bench.land()
    bench.step()
    bench.receive("b", blocks=(1,))
    assert bench.step().skipped == {}
    bench.fails = lambda: False
    assert list(until(bench, lambda: bool(bench.landed)))[-1].skipped == {"epoch": 1}


def test_while_a_snapshot_is_taken_fragments_are_merged_and_pushed() -> None:
    bench, pushes = SlowBench(fragment_fraction=0.005), list[Push]()
    hear(bench.exchange, {Push: pushes.append})
    bench.want()
    bench.step()
    bench.receive("b", blocks=(1, 30))
    bench.exchange.offer_push(push_plan(3))
    report = bench.step()
    assert (report.merged, report.sent, len(bench.snapshots)) == (1, 1, 0)
    list(until(bench, lambda: bool(bench.snapshots)))
    same = (bench.snapshots[0].weights == bench.flat()).all(1)
    assert [n for n in range(NUM_BLOCKS) if not same[n]] == [1]  # copied before it was merged; block 30 after


def test_a_snapshot_that_a_landing_meets_begins_again() -> None:
    bench = SlowBench()
    bench.want()
    bench.step()
    bench.land("write")
    list(until(bench, lambda: bool(bench.snapshots)))
    (snapshot,) = bench.snapshots
    assert snapshot.epoch == Epoch("L", 4)
    assert snapshot.steps > 5
    assert torch.equal(snapshot.weights, bench.flat())


@pytest.mark.parametrize("replaced", [True, False])
def test_what_was_copied_for_a_request_that_is_withdrawn_is_dropped_at_once(replaced: bool) -> None:
    """The node may have another use for its buffer."""
    bench = SlowBench()
    first = bench.want()
    bench.step()
    bench.exchange.want_snapshot(None)
    first.buffer.fill_(7.0)
    if replaced:
        bench.want()
    bench.train()
    for _ in range(15):
        bench.step()
    assert (first.buffer == 7.0).all()
    assert [snapshot.steps for snapshot in bench.snapshots] == ([4] if replaced else [])
    if replaced:
        assert torch.equal(bench.snapshots[0].weights, bench.flat())


def test_a_snapshot_is_whole_in_time() -> None:
    """The last slice that is in time copies the rest."""
    bench = SlowBench()
    by_s = bench.now + 3.5 * STEP_S
    bench.want(whole_by_s=by_s)
    list(until(bench, lambda: bool(bench.snapshots)))
    assert bench.exchange.steps == 4
    assert by_s - STEP_S < bench.now - bench.snapshots[0].held_s + 2 * PIECE_S * 5 < by_s


def test_the_last_round_of_a_run_lands_in_one_slice() -> None:
    """Else training would change what has landed, and peers would not end with equal weights."""
    bench = SlowBench()
    buffer = bench.land("write", finished=True)
    bench.train()
    bench.step()
    assert bench.exchange.finished
    assert torch.equal(bench.flat(), buffer)


@pytest.mark.parametrize("kind", ["add", "write"])
def test_without_training_the_rest_is_one_slice(kind: str) -> None:
    for go_on in ("idle", "finish_landing"):
        bench = SlowBench()
        before, buffer = bench.flat(), bench.land(kind)
        bench.step()
        assert bench.exchange.landing_pending
        getattr(bench.exchange, go_on)()
        assert not bench.exchange.landing_pending
        assert torch.equal(bench.flat(), before + buffer if kind == "add" else buffer)


def test_a_landing_that_has_not_begun_is_not_settled() -> None:
    bench = SlowBench()
    before = bench.flat()
    bench.land()
    bench.exchange.finish_landing()
    assert bench.exchange.landing_pending
    assert torch.equal(bench.flat(), before)


@pytest.mark.parametrize("shape", ["flat", "transposed", "empty", "several pieces", "a value more"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_have_the_bits_of_whole_tensors(dtype: torch.dtype, shape: str) -> None:
    tensors = {
        "flat": torch.randn(70), "transposed": torch.randn(64, 40).t(), "empty": torch.zeros(0, 5),
        "several pieces": torch.randn(5, 50), "a value more": torch.randn(65),
    }  # fmt: skip
    tensor = torch.nn.Parameter(tensors[shape].to(dtype))
    space = indexspace.IndexSpace([("t", tuple(tensor.shape))])
    view, values = ParameterView(space, [tensor]), torch.randn(space.num_blocks, 64)
    for adds in (True, False):
        out = torch.full_like(values, torch.nan)
        for transfer in (in_pieces(view).flat.read(out), in_pieces(view).flat.land(values, adds=adds)):
            before = tensor.detach().clone()
            assert isinstance(transfer, Pieces)
            count = 1
            while transfer.advance():
                count += 1
            transfer.finish()
            assert count >= (tensor.numel() // 64 if shape == "several pieces" else 1)
        line = out.view(-1)
        assert torch.equal(line[: before.numel()].view(before.shape), before.float())
        assert not line[before.numel() :].any()
        part = values.view(-1)[: before.numel()].view(before.shape)
        assert torch.equal(tensor, before.add_(part) if adds else part.to(dtype))


def one_piece_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual time, which stands still in a step: a slice is over after one piece."""
    monkeypatch.setattr(indexspace, "_PIECE_VALUES", 2**15)
    monkeypatch.setattr(slices, "SHARE", 0.0)
    monkeypatch.setattr(slices, "LEAST_S", 0.0)


def test_peers_that_take_slices_commit_rounds_with_equal_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each anchor is the outer step of the snapshots' mean; nobody is late; fragments are merged."""
    one_piece_a_step(monkeypatch)

    async def main() -> None:
        witness = Witness()
        async with swarm(dataclasses.replace(RUN, round_codec="none", sync_every=50)) as s:
            start_all(s, "abc", witness)
            landing_steps = 0
            while not common(s, 3, 3):
                await trio.sleep(0.05)
                s.check()
                landing_steps += sum(peer.exchange._landed_in_part for peer in s.peers.values())
            assert witness.check_values() >= 6
            assert landing_steps > 3 * 3 * 4
            for peer in s.peers.values():
                assert not any(event["late"] for event in peer.rounds("committed"))
                assert sum(report.merged for report in peer.reports) > 10

    run_virtual(main)


def test_peers_that_take_slices_end_a_run_with_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    one_piece_a_step(monkeypatch)

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=100)) as s:
            for name, step_s in {"a": 0.1, "b": 0.13, "c": 0.1}.items():
                s.start(name, founder=name == "a", step_s=step_s)
            await s.until(lambda: all(peer.exchange.finished for peer in s.peers.values()))
            await trio.sleep(2)
            for peer in s.peers.values():
                assert torch.equal(peer.flat(), peer.node.state.anchor_tensor())
                assert torch.equal(peer.flat(), s.peers["a"].flat())

    run_virtual(main)


def test_slices_are_in_time_for_rounds_where_the_window_is_a_few_steps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 2.5 steps of the slowest, and one piece a step would take seven."""
    one_piece_a_step(monkeypatch)

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=20)) as s:
            for name, step_s in {"a": 3.0, "b": 4.0, "c": 6.0}.items():
                s.start(name, founder=name == "a", step_s=step_s)
            await s.until(lambda: len(s.peers["a"].rounds()) >= 4, within_s=600)
            for peer in s.peers.values():
                assert not any(event["late"] for event in peer.rounds())
            assert len(s.peers["a"].rounds()[-1]["contributors"]) == 3

    run_virtual(main)


def test_an_interrupt_while_weights_change_comes_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, training goes on with the same peer after Ctrl-C: each weight must change once."""
    bench, add = Bench(), indexspace._add

    def interrupted(*args: Any) -> None:
        add(*args)
        signal.raise_signal(signal.SIGINT)

    bench.steps(2)
    before = [tensor.clone() for tensor in bench.tensors]
    bench.exchange.land(landing(kind="add", buffer=torch.ones(NUM_BLOCKS, 64)))
    with monkeypatch.context() as patch:
        patch.setattr(indexspace, "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.step()
    bench.steps(3)
    assert all(torch.equal(now, then + 1) for now, then in zip(bench.tensors, before, strict=True))
