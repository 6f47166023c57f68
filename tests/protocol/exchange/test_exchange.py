"""`Exchange.step()`: which fragments are merged or skipped, when a round is due, and how it lands."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.algorithms.indexspace import BlockPlan, IndexSpace, ParameterView
from p2ptrain.algorithms.transfers import Transfers, in_pieces
from p2ptrain.peer.device_transfers import device_transfers
from p2ptrain.peer.side_stream import SideStream
from p2ptrain.protocol.exchange import inbox
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.inbox import MAX_INBOX, MAX_WAITING_PER_SENDER
from p2ptrain.protocol.exchange.types import (
    Arrival,
    Epoch,
    Landing,
    LandingDone,
    OutlierFound,
    Push,
    PushPlan,
    RoundDue,
    RoundReport,
    Snapshot,
    SnapshotTaken,
    SnapshotWanted,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.hearing import hear

SPACE = IndexSpace([("matrix", (30, 64)), ("bias", (70,))])
STEP_S = 0.1


class Bench:
    """An exchange on a hand-driven clock; what it posts to the node's side waits until `deliver_posts`."""

    def __init__(
        self, *, fragment_fraction: float = 0.1, sync_every: int = 10, total_steps: int = 0,
        side: SideStream | None = None, round_sections: int = 1,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(30, 64, generator=generator), torch.randn(70, generator=generator)]
        self.now = 100.0
        self.posted: list[Callable[[], object]] = []
        run = RunConfig(
            fragment_fraction=fragment_fraction, sync_every=sync_every, total_steps=total_steps,
            round_sections=round_sections,
        )  # fmt: skip
        view = ParameterView(SPACE, self.tensors)
        self.exchange = Exchange(
            view, run, transfers=self.transfers(view, side), clock=lambda: self.now, post=self.posted.append
        )
        self.exchange.epoch = Epoch("L", 3)

    def transfers(self, view: ParameterView, side: SideStream | None) -> Transfers:
        return in_pieces(view) if side is None else device_transfers(view, side)

    def step(self, samples: int = 16, *, took_s: float = STEP_S):
        self.now += took_s
        return self.exchange.step(samples)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def deliver_posts(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for work in posted:
            work()

    def flat(self) -> torch.Tensor:
        flat = torch.empty(SPACE.num_blocks, 64)
        self.exchange.view.read(flat)
        return flat

    def near(self, plan: BlockPlan, by: float = 0.01) -> torch.Tensor:
        """Values close to ours, as an honest partner's are."""
        return self.exchange.view.gather(plan) + by

    def receive(
        self, sender: str = "b", *, blocks: object = (1, 5), values: torch.Tensor | None = None,
        epoch: Epoch | None = None, age_s: float = 0.0,
    ) -> Arrival:  # fmt: skip
        plan = SPACE.plan(np.array(blocks))
        values = self.near(plan) if values is None else values
        arrival = Arrival(sender, epoch or Epoch("L", 3), plan, values, age_s, self.now)
        self.exchange.inbox.put(arrival)
        return arrival


def landing(**changes: object) -> Landing:
    fields: dict[str, object] = {
        "kind": "keep", "buffer": None, "epoch": Epoch("L", 4), "sync_every": 10, "run_step": 0,
        "included_tokens": 0, "snapshot_steps": None, "report": None, "finished": False,
    }  # fmt: skip
    return Landing(**{**fields, **changes})  # type: ignore[arg-type]


# --- merging -----------------------------------------------------------------------------------------------------


def test_a_fragment_moves_its_blocks_halfway_and_nothing_else() -> None:
    bench = Bench()
    bench.steps(2)
    before, pointers = bench.flat(), [tensor.data_ptr() for tensor in bench.tensors]
    arrival = bench.receive(blocks=(2, 31))
    report = bench.step()
    assert (report.merged, report.skipped, report.sent) == (1, {}, 0)
    expected = before.clone()
    expected[[2, 31]] = (before[[2, 31]] + arrival.values) / 2
    expected[31, 6:] = 0  # the bias has 70 values: the rest of its second block is padding
    torch.testing.assert_close(bench.flat(), expected)
    assert [tensor.data_ptr() for tensor in bench.tensors] == pointers


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_m_fragments_on_one_slot_weigh_the_same_as_our_own(m: int) -> None:
    bench = Bench()
    bench.steps(2)
    before = bench.flat()[[1, 5]]
    arrivals = [bench.receive(f"peer {i}", values=before + 0.01 * (i - 1)) for i in range(m)]
    assert bench.step().merged == m
    mean = sum((arrival.values for arrival in arrivals), before) / (m + 1)
    torch.testing.assert_close(bench.flat()[[1, 5]], mean)


def test_overlap_is_weighed_block_by_block() -> None:
    bench = Bench()
    bench.steps(2)
    before = bench.flat()
    first = bench.receive("b", blocks=(1, 5))
    second = bench.receive("c", blocks=(5, 9), values=before[[5, 9]] - 0.01)
    assert bench.step().merged == 2
    after = bench.flat()
    torch.testing.assert_close(after[1], (before[1] + first.values[0]) / 2)
    torch.testing.assert_close(after[5], (before[5] + first.values[1] + second.values[0]) / 3)
    torch.testing.assert_close(after[9], (before[9] + second.values[1]) / 2)


# --- every reason to skip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [Epoch("L", 2), Epoch("other", 3), Epoch("other", 9), Epoch("", -1)])
def test_fragments_of_the_past_or_of_another_lineage_are_skipped(epoch: Epoch) -> None:
    bench = Bench()
    bench.steps(2)
    before = bench.flat()
    bench.receive(epoch=epoch)
    assert bench.step().skipped == {"epoch": 1}
    assert torch.equal(bench.flat(), before)


def test_a_fragment_of_the_next_epoch_waits_until_its_round_has_landed_here() -> None:
    bench = Bench()
    bench.steps(2)
    ahead, same = bench.receive("b", epoch=Epoch("L", 4)), bench.receive("c", blocks=(7,))
    report = bench.step(took_s=0.01)
    assert (report.merged, report.skipped) == (1, {})
    bench.exchange.land(landing())
    before = bench.flat()[[1, 5]]
    report = bench.step(took_s=0.01)
    assert (report.merged, report.skipped) == (1, {})
    torch.testing.assert_close(bench.flat()[[1, 5]], (before + ahead.values) / 2)
    assert same.sender == "c"


def test_a_fragment_that_is_ahead_for_too_long_grows_too_old() -> None:
    bench = Bench()
    bench.steps(2)
    bench.receive(epoch=Epoch("L", 99))
    skipped = [bench.step().skipped for _ in range(4)]
    assert skipped == [{}, {}, {"too_old": 1}, {}]


@pytest.mark.parametrize(
    ("fragment_fraction", "limit_steps"),
    [(0.1, 2.0), (0.02, 7.5), (0.005, 30.0)],
)
def test_age_is_counted_in_our_own_steps(fragment_fraction: float, limit_steps: float) -> None:
    """p · delay above 0.15 is skipped, but never below two steps; what waited here counts as well."""
    bench = Bench(fragment_fraction=fragment_fraction)
    bench.steps(200)
    assert bench.exchange.max_age_s == pytest.approx(limit_steps * STEP_S)
    bench.receive("b", age_s=(limit_steps - 1.1) * STEP_S)
    assert bench.step().merged == 1
    bench.receive("b", age_s=(limit_steps - 0.9) * STEP_S)
    assert bench.step().skipped == {"too_old": 1}


def test_a_far_fragment_is_clipped_and_changes_nothing() -> None:
    bench = Bench()
    bench.steps(2)
    before = bench.flat()
    bench.receive("b", values=torch.full((2, 64), 100.0))
    bench.receive("c", values=torch.full((2, 64), float("nan")))
    assert bench.step().skipped == {"clipped": 2}
    assert torch.equal(bench.flat(), before)
    # Once it is known what is normal, ten times that is too far.
    for _ in range(10):
        plan = SPACE.plan(np.array((1, 5)))
        bench.receive("b", values=bench.near(plan, 0.01))
        assert bench.step().merged == 1
    bench.receive("b", values=bench.near(plan, 0.1))
    assert bench.step().skipped == {"clipped": 1}


def test_of_one_sender_a_step_merges_one_and_few_wait() -> None:
    bench = Bench(fragment_fraction=0.005)
    bench.steps(2)
    for block in range(6):
        bench.receive("b", blocks=(block,))
    before = bench.flat()
    report = bench.step()
    assert (report.merged, report.skipped) == (1, {"superseded": 5 - MAX_WAITING_PER_SENDER})
    changed = [(bench.flat() != before)[block].any().item() for block in range(6)]
    assert changed == [False, False, False, True, False, False]  # the oldest of the newest three
    merged = [bench.step().merged for _ in range(MAX_WAITING_PER_SENDER + 1)]
    assert merged == [1] * MAX_WAITING_PER_SENDER + [0]


@pytest.mark.parametrize("far", [True, False])
def test_of_one_sender_a_step_looks_at_one_also_if_it_is_clipped(far: bool) -> None:
    bench = Bench(fragment_fraction=0.005)
    bench.steps(2)
    before = bench.flat()
    for values in (before[:1] + (100.0 if far else 0.01), before[:1] + 0.01):
        bench.receive("b", blocks=(0,), values=values)
    report = bench.step()
    assert (report.merged, report.skipped) == ((0, {"clipped": 1}) if far else (1, {}))
    assert torch.equal(bench.flat(), before) == far
    assert bench.step().merged == 1


def test_a_sender_that_floods_takes_no_other_ones_place() -> None:
    bench = Bench(fragment_fraction=0.005)
    bench.steps(2)
    bench.receive("c", blocks=(1,))
    for _ in range(1000):
        bench.receive("x", blocks=(5,), values=torch.zeros(1, 64))
    report = bench.step()
    assert (report.merged, report.skipped) == (1, {"superseded": 997, "clipped": 1})
    assert sum(arrival.values.nbytes for arrival in bench.exchange.inbox._waiting) == bench.exchange.inbox._bytes


def test_an_outlier_is_told_to_the_node() -> None:
    bench, outliers = Bench(fragment_fraction=0.005), []
    hear(bench.exchange, {OutlierFound: outliers.append})
    bench.steps(2)
    for step in range(250):
        for sender, by in (("b", 0.01), ("c", 0.01), ("x", 100.0)):
            bench.receive(sender, blocks=(5,), values=bench.flat()[5:6] + by)
        bench.step()
        bench.deliver_posts()
        assert len(outliers) == (step + 1) // 100
    assert set(outliers) == {"x"}


def test_the_inbox_is_bounded_and_drops_the_oldest() -> None:
    bench = Bench(fragment_fraction=0.005)
    bench.steps(2)
    before = bench.flat()
    for i in range(MAX_INBOX + 10):
        bench.receive(f"peer {i}", blocks=(0 if i < 10 else 1,), values=before[:1] + 0.01)
    report = bench.step()
    assert report.skipped["inbox_full"] == 10
    assert report.merged + report.skipped.get("clipped", 0) == MAX_INBOX
    assert torch.equal(bench.flat()[0], before[0])


def test_the_inbox_is_bounded_for_those_ahead_too() -> None:
    bench = Bench(fragment_fraction=0.001)
    bench.steps(2)
    delivered = skipped = 0
    for _ in range(5):
        for i in range(50):
            bench.receive(f"peer {delivered + i}", epoch=Epoch("L", 99))
        delivered += 50
        skipped += sum(bench.step().skipped.values())
    assert delivered - skipped <= MAX_INBOX


def test_counts_add_up_until_they_are_taken() -> None:
    bench = Bench()
    bench.steps(2)
    for _ in range(3):
        bench.receive("b")
        bench.receive("c", epoch=Epoch("L", 0))
        for _ in range(2):
            bench.exchange.inbox.count_skipped("not linked")
        assert bench.step().skipped == {"epoch": 1, "not linked": 2}
    merged, skipped, age_steps = bench.exchange.inbox.take_counts()
    assert (merged, skipped) == (3, {"epoch": 3, "not linked": 6})
    assert age_steps >= 0
    assert bench.exchange.inbox.take_counts() == (0, {}, 0.0)


def test_nothing_is_lost_between_two_threads() -> None:
    bench = Bench(fragment_fraction=0.0001)
    bench.steps(2)
    done = threading.Event()
    plan = SPACE.plan(np.array((1, 5)))
    values = bench.near(plan)

    def network() -> None:
        for i in range(2000):
            bench.exchange.inbox.put(Arrival(f"peer {i % 40}", Epoch("L", 3), plan, values, 0.0, bench.now))
        done.set()

    thread = threading.Thread(target=network)
    thread.start()
    counted = 0
    while True:
        last = done.is_set()
        report = bench.step(took_s=0.001)
        counted += report.merged + sum(report.skipped.values())
        if last and report.merged == 0:
            break
    thread.join()
    assert counted == 2000


# --- pushing -----------------------------------------------------------------------------------------------------


def push_plan(*blocks: int, slot_count: int = 1, due_s: float = 0.0) -> PushPlan:
    return PushPlan(0, 0, slot_count, SPACE.plan(np.array(blocks)), due_s)


def test_a_push_holds_the_weights_as_they_were() -> None:
    bench = Bench()
    pushes: list[Push] = []
    hear(bench.exchange, {Push: pushes.append})
    bench.exchange.offer_push(push_plan(3, 31))
    report = bench.step()
    gathered, then = bench.flat()[[3, 31]], bench.now
    assert report.sent == 1
    assert not pushes  # handed over on the node's side only
    for tensor in bench.tensors:
        tensor += 1
    bench.step()
    bench.deliver_posts()
    assert len(pushes) == 1
    assert torch.equal(pushes[0].values, gathered)
    assert (pushes[0].gathered_s, pushes[0].epoch) == (then, Epoch("L", 3))


@pytest.mark.parametrize("slot_count", [1, 3, 7])
def test_a_push_of_several_slots_stands_for_as_many_steps(slot_count: int) -> None:
    bench = Bench()
    pushed_at: list[int] = []
    hear(bench.exchange, {Push: lambda push: pushed_at.append(bench.exchange.steps)})
    for _ in range(22):
        bench.exchange.offer_push(push_plan(3, slot_count=slot_count))
        bench.step()
        bench.deliver_posts()
    assert pushed_at == list(range(slot_count, 23, slot_count))


def test_a_plan_that_is_offered_early_is_gathered_at_the_first_step_after_its_time() -> None:
    bench = Bench()
    bench.exchange.offer_push(push_plan(3, due_s=bench.now + 2.5 * STEP_S))
    assert [bench.step().sent for _ in range(4)] == [0, 0, 1, 0]


# --- where we stand ----------------------------------------------------------------------------------------------


def test_the_run_step_advances_by_ours_scaled_to_the_runs_interval() -> None:
    """H = 10 of the run; a slow peer's own interval of 4 covers the same stretch of the run."""
    bench = Bench(sync_every=10)
    positions = []
    bench.exchange.land(landing(sync_every=4, run_step=200, snapshot_steps=0))
    for _ in range(6):
        bench.step()
        positions.append((bench.exchange.run_step, bench.exchange.due))
    assert positions == [(202, False), (205, False), (207, False), (210, True), (212, True), (215, True)]


@settings(max_examples=50, derandomize=True)
@given(
    run_h=st.integers(1, 50),
    own_h=st.integers(1, 200),
    base=st.integers(0, 1000),
    total=st.integers(0, 1200),
    late=st.integers(0, 5),
)
def test_a_round_is_due_at_our_interval_and_there_the_run_is_one_interval_further(
    run_h: int, own_h: int, base: int, total: int, late: int
) -> None:
    bench = Bench(sync_every=run_h, total_steps=total, fragment_fraction=0.0)
    bench.steps(late)
    bench.exchange.land(landing(sync_every=own_h, run_step=base, snapshot_steps=0))
    bench.exchange.idle()
    position = bench.exchange.run_step
    for steps in range(late + 1, own_h + 1):
        bench.step()
        assert bench.exchange.run_step >= position
        position = bench.exchange.run_step
        assert bench.exchange.due == (steps >= own_h or 0 < total <= position)
    if late <= own_h:
        assert position == (min(base + run_h, total) if total else base + run_h)
    assert bench.exchange.at_length == (0 < total <= position)


def test_due_is_told_once_a_round() -> None:
    bench = Bench(sync_every=3)
    told: list[int] = []
    hear(bench.exchange, {RoundDue: lambda: told.append(bench.exchange.steps)})
    for _ in range(7):
        bench.step()
        bench.deliver_posts()
    assert told == [3]
    bench.exchange.land(landing(sync_every=3, snapshot_steps=5))
    for _ in range(3):
        bench.step()
        bench.deliver_posts()
    assert told == [3, 8]
    bench.exchange.postpone()
    assert not bench.exchange.due
    for _ in range(5):
        bench.step()
        bench.deliver_posts()
    assert told == [3, 8, 13]


def test_a_skipped_round_changes_nothing_but_the_time_of_the_next() -> None:
    bench = Bench(sync_every=4, total_steps=0)
    bench.steps(6)
    before, run_step, tokens = bench.flat(), bench.exchange.run_step, bench.exchange.tokens
    bench.exchange.postpone()
    assert torch.equal(bench.flat(), before)
    assert (bench.exchange.run_step, bench.exchange.tokens) == (run_step, tokens) == (6, 96)
    assert bench.exchange.epoch == Epoch("L", 3)
    bench.steps(3)
    assert not bench.exchange.due
    bench.step()
    assert bench.exchange.due


def test_at_the_runs_length_it_stays_due_and_the_position_stays() -> None:
    bench = Bench(sync_every=10, total_steps=25)
    bench.exchange.land(landing(run_step=20, snapshot_steps=0))
    bench.steps(4)
    assert not bench.exchange.due
    bench.steps(3)
    assert (bench.exchange.run_step, bench.exchange.at_length, bench.exchange.due) == (25, True, True)
    bench.exchange.postpone()
    assert bench.exchange.due


# --- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_is_taken_when_due_or_at_the_latest() -> None:
    bench = Bench(sync_every=4)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    buffer = torch.empty(SPACE.num_blocks, 64)
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=bench.now + 1000))
    bench.steps(3)
    bench.deliver_posts()
    assert not taken
    bench.step()
    bench.deliver_posts()
    assert len(taken) == 1
    assert taken[0].weights is buffer
    assert torch.equal(buffer, bench.flat())
    assert (taken[0].steps, taken[0].tokens, taken[0].run_step) == (4, 64, 4)
    assert (taken[0].epoch, taken[0].at_length) == (Epoch("L", 3), False)

    bench.exchange.land(landing(snapshot_steps=4, included_tokens=64))
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=bench.now + 0.15))
    bench.steps(1)
    bench.deliver_posts()
    assert len(taken) == 1
    bench.steps(1)
    bench.deliver_posts()
    assert (taken[1].epoch, taken[1].steps, taken[1].tokens) == (Epoch("L", 4), 6, 32)


def test_a_snapshot_that_is_not_wanted_any_more_is_not_taken() -> None:
    bench = Bench(sync_every=2)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(SPACE.num_blocks, 64), latest_s=0.0))
    bench.exchange.want_snapshot(None)
    bench.steps(3)
    bench.deliver_posts()
    assert not taken


def test_a_snapshot_in_the_step_of_a_landing_is_of_the_new_epoch() -> None:
    """So the driver can tell a snapshot that was asked for before its round had landed."""
    bench = Bench(sync_every=2)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.steps(1)
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(SPACE.num_blocks, 64), latest_s=0.0))
    bench.exchange.land(landing(kind="write", buffer=torch.zeros(SPACE.num_blocks, 64), snapshot_steps=1))
    bench.step()
    bench.deliver_posts()
    assert taken[0].epoch == Epoch("L", 4)
    assert not taken[0].weights.any()


# --- landing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["add", "keep", "write"])
def test_the_kinds_of_landing(kind: str) -> None:
    bench = Bench()
    bench.steps(2)
    before, pointers = bench.flat(), [tensor.data_ptr() for tensor in bench.tensors]
    buffer = torch.randn(SPACE.num_blocks, 64, generator=torch.Generator().manual_seed(1))
    buffer[-1, 6:] = 0
    report = RoundReport(4, "committed", "L")
    bench.exchange.land(landing(kind=kind, buffer=None if kind == "keep" else buffer, report=report, run_step=70))
    assert bench.exchange.landing_pending
    assert torch.equal(bench.flat(), before)  # nothing happens outside of step()
    result = bench.step()
    assert result.round is report
    expected = {"add": before + buffer, "keep": before, "write": buffer}[kind]
    torch.testing.assert_close(bench.flat(), expected)
    assert [tensor.data_ptr() for tensor in bench.tensors] == pointers
    assert (bench.exchange.epoch, bench.exchange.landing_pending) == (Epoch("L", 4), False)
    assert bench.exchange.run_step == 70
    assert bench.step().round is None


def test_after_the_last_landing_no_fragment_changes_the_weights_and_none_is_sent() -> None:
    """A fragment of a peer at which the last round has landed is not bit-equal to our weights: it was encoded."""
    bench = Bench(fragment_fraction=1.0, total_steps=5)
    bench.steps(2)
    anchor = torch.zeros(SPACE.num_blocks, 64)
    bench.exchange.land(landing(kind="write", buffer=anchor, run_step=5, finished=True))
    bench.receive(epoch=Epoch("L", 4), values=torch.full((2, 64), 1e-3))
    bench.exchange.offer_push(push_plan(1, 5))
    report = bench.step()
    bench.deliver_posts()
    assert (report.finished, report.merged, report.sent) == (True, 0, 0)
    assert torch.equal(bench.flat(), anchor)


@pytest.mark.parametrize(("kind", "left"), [("add", 7 * 16 - 80), ("keep", 7 * 16 - 80), ("write", 0)])
def test_landing_settles_tokens_and_counts_the_next_interval_from_the_snapshot(kind: str, left: int) -> None:
    bench = Bench(sync_every=5)
    bench.steps(6)
    buffer = torch.zeros(SPACE.num_blocks, 64)
    bench.exchange.land(landing(kind=kind, buffer=buffer, included_tokens=80, snapshot_steps=5, sync_every=5))
    bench.step()
    assert bench.exchange.tokens == left
    bench.steps(2)
    assert not bench.exchange.due
    bench.step()
    assert bench.exchange.due  # at step 10, five from the snapshot


def test_the_landing_is_told_when_it_has_taken_effect() -> None:
    bench = Bench()
    told: list[Landing] = []
    hear(bench.exchange, {LandingDone: lambda landed, held_s: told.append(landed)})
    this = landing(finished=True)
    bench.exchange.land(this)
    with pytest.raises(AssertionError, match="one round lands at a time"):
        bench.exchange.land(landing())
    bench.deliver_posts()
    assert not told
    assert bench.step().finished
    bench.deliver_posts()
    assert told == [this]
    assert bench.exchange.finished


def test_waiting_for_the_end_lands_and_snapshots_but_does_not_train() -> None:
    bench = Bench(sync_every=2)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.steps(2)
    bench.exchange.offer_push(push_plan(3))
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(SPACE.num_blocks, 64), latest_s=1e9))
    report = RoundReport(4, "committed", "L")
    bench.exchange.land(landing(report=report, snapshot_steps=0, sync_every=2))
    before = bench.flat()
    bench.receive()
    bench.exchange.idle()
    bench.exchange.idle()
    bench.deliver_posts()
    assert len(taken) == 1
    assert torch.equal(bench.flat(), before)
    assert (bench.exchange.steps, bench.exchange.tokens) == (2, 32)
    assert bench.step().round is report


def test_the_step_time_follows_slowly_and_a_pause_is_no_step() -> None:
    bench = Bench()
    bench.steps(50)
    assert bench.exchange.step_s == pytest.approx(STEP_S)
    bench.step(took_s=1000 * STEP_S)
    assert bench.exchange.step_s == pytest.approx(1.1 * STEP_S)
    bench.steps(50)
    for _ in range(60):
        bench.step(took_s=3 * STEP_S)
    assert bench.exchange.step_s == pytest.approx(3 * STEP_S, rel=0.02)
    # One long step in four is usual, and counts.
    for _ in range(40):
        bench.step(took_s=9 * STEP_S)
        bench.steps(3)
    assert bench.exchange.step_s == pytest.approx(3 * STEP_S, rel=0.2)


def test_the_age_of_what_was_merged_is_told_in_own_steps() -> None:
    bench = Bench()
    bench.steps(20)
    bench.receive("b", age_s=0.05)
    bench.step()
    merged, _, age_steps = bench.exchange.inbox.take_counts()
    assert merged == 1
    # 0.05 s on the way and one step of 0.1 s until it was merged.
    assert age_steps == pytest.approx(1.5, abs=0.2)


def test_changes_are_the_blocks_that_were_merged_or_everything_that_landed() -> None:
    bench = Bench()
    assert (bench.exchange.take_changes().everything, len(bench.exchange.take_changes().blocks)) == (False, 0)
    bench.steps(2)
    bench.receive("b", blocks=(5, 1))
    bench.receive("c", blocks=(5, 7))
    bench.receive("d", blocks=(3,), epoch=Epoch("L", 2))  # too old a round: not merged
    bench.step()
    assert bench.exchange.take_changes().blocks.tolist() == [1, 5, 7]
    bench.receive("b", blocks=(4,))
    bench.step()
    bench.step()  # those of a step that nobody asked about are forgotten
    assert bench.exchange.take_changes().blocks.tolist() == []


@pytest.mark.parametrize(("kind", "everything"), [("keep", False), ("add", True), ("write", True)])
def test_a_landing_changes_everything_unless_it_keeps_the_weights(kind: str, everything: bool) -> None:
    bench = Bench()
    bench.exchange.land(landing(kind=kind, buffer=None if kind == "keep" else bench.flat()))
    bench.exchange.idle()
    bench.step()
    assert bench.exchange.take_changes().everything == everything
    assert not bench.exchange.take_changes().everything


def test_the_inbox_is_bounded_in_bytes_and_one_fragment_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(2, 64)
    monkeypatch.setattr(inbox, "MAX_INBOX_BYTES", 3 * values.nbytes)
    bench = Bench()
    bench.steps(2)
    for sender in "bcdef":
        bench.receive(sender)
    report = bench.step()
    assert (report.merged, report.skipped) == (3, {"inbox_full": 2})
    monkeypatch.setattr(inbox, "MAX_INBOX_BYTES", 1)
    for sender in "bc":
        bench.receive(sender)
    report = bench.step()
    assert (report.merged, report.skipped) == (1, {"inbox_full": 1})


# --- sections ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_and_a_landing_of_a_section_are_of_its_tensors_alone() -> None:
    bench, taken = Bench(round_sections=2), list[torch.Tensor]()
    assert bench.exchange.sections == [(0, 30), (30, 32)]
    hear(bench.exchange, {SnapshotTaken: lambda snapshot: taken.append(snapshot.weights)})
    buffer = bench.exchange.new_buffer(1)
    assert buffer.shape == (2, 64)
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=0.0, section=1))
    before = bench.flat()
    bench.step()
    bench.deliver_posts()
    assert torch.equal(taken[0], before[30:])
    bench.exchange.land(landing(kind="add", buffer=torch.ones(30, 64), section=0))
    bench.step()
    assert torch.equal(bench.flat()[:30], before[:30] + 1)
    assert torch.equal(bench.flat()[30:], before[30:])


def test_without_sections_a_round_is_of_all_tensors() -> None:
    assert Bench().exchange.sections == []
