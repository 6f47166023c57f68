"""An exchange whose transfers end in later steps: what each holds, when it takes effect, and what is never lost."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
import trio

from p2ptrain.protocol.exchange import merging
from p2ptrain.protocol.exchange.merging import MOST_OF_SENDER
from p2ptrain.protocol.exchange.pushing import MOST_PUSHES_UNDER_WAY
from p2ptrain.protocol.exchange.types import (
    Epoch,
    Landing,
    LandingDone,
    Push,
    Snapshot,
    SnapshotTaken,
    SnapshotWanted,
    StepReport,
)
from tests.protocol.exchange.test_exchange import SPACE, Bench, landing, push_plan
from tests.protocol.hearing import hear
from tests.protocol.swarm import RUN, Witness, common, run_virtual, start_all, swarm
from tests.side_stream import LateStream, Mistake, bits

NUM_BLOCKS = SPACE.num_blocks


class Story:
    """A bench on which everything happens, as the seed says: training, fragments, pushes, snapshots, landings.

    Attributes:
        after: weights and epoch after each step.
    """

    def __init__(self, seed: int, side: LateStream | None) -> None:
        self.bench = Bench(fragment_fraction=0.05, sync_every=10, side=side)
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.after: dict[int, tuple[torch.Tensor, Epoch]] = {}
        self.reports: list[StepReport] = []
        self.pushes: list[Push] = []
        self.snapshots: list[Snapshot] = []
        self.handed: list[Landing] = []
        self.landed: list[Landing] = []
        self.put = 0
        exchange = self.bench.exchange
        hear(exchange, {Push: self.pushes.append, SnapshotTaken: self.snapshots.append})
        hear(exchange, {LandingDone: self._on_landed})

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._act()
            for tensor in self.bench.tensors:
                tensor.mul_(0.999).add_(0.001 * torch.randn(tensor.shape, generator=self.generator))
            self.reports.append(self.bench.step())
            exchange = self.bench.exchange
            self.after[exchange.steps] = self.bench.flat(), exchange.epoch
            self.bench.deliver_posts()

    def _act(self) -> None:
        exchange, rng = self.bench.exchange, self.rng
        for sender in "bcd":
            if rng.random() < 0.5:
                blocks = sorted(rng.sample(range(NUM_BLOCKS), 5))
                far = 100.0 if rng.random() < 0.1 else 0.01
                epoch = Epoch("L", exchange.epoch.round + rng.choice((0, 0, 0, 1)))
                values = self.bench.flat()[blocks] + far * rng.random()
                self.bench.receive(sender, blocks=blocks, values=values, epoch=epoch)
                self.put += 1
        if rng.random() < 0.7:
            exchange.offer_push(push_plan(*rng.sample(range(NUM_BLOCKS), 4)))
        if rng.random() < 0.2:
            exchange.want_snapshot(SnapshotWanted(torch.zeros(NUM_BLOCKS, 64), latest_s=0.0))
        if rng.random() < 0.2 and not exchange.landing_pending:
            buffer = 0.01 * torch.randn(NUM_BLOCKS, 64, generator=self.generator)
            kind = rng.choice(("add", "add", "write", "keep"))
            self.handed.append(landing(kind=kind, buffer=buffer, epoch=Epoch("L", exchange.epoch.round + 1)))
            exchange.land(self.handed[-1])

    def _on_landed(self, landed: Landing, held_s: float) -> None:
        self.landed.append(landed)
        assert landed.buffer is not None
        landed.buffer.fill_(torch.nan)  # the node may use its memory for other things now

    def results(self) -> list[Any]:
        """All that the exchange did, comparable."""
        return [
            [(report.sent, report.merged, report.skipped) for report in self.reports],
            [(bits(flat).tolist(), epoch) for flat, epoch in self.after.values()],
            [(push.steps, push.epoch, push.gathered_s, bits(push.values).tolist()) for push in self.pushes],
            [(taken.steps, taken.tokens, taken.epoch, bits(taken.weights).tolist()) for taken in self.snapshots],
            [landed.epoch for landed in self.landed],
        ]


def test_transfers_that_are_done_at_once_change_no_bit() -> None:
    on_cpu, on_device = Story(0, None), Story(0, LateStream())
    on_cpu.run(100)
    on_device.run(100)
    assert on_cpu.results() == on_device.results()
    assert min(len(on_cpu.pushes), len(on_cpu.snapshots), len(on_cpu.landed)) > 8


@pytest.mark.parametrize("seed", range(3))
def test_what_arrives_late_is_of_the_step_that_began_it_and_nothing_is_lost(seed: int) -> None:
    delays = random.Random(seed)
    story = Story(seed, LateStream(lambda: delays.randrange(5)))
    story.run(200)
    # Without further requests, all that is under way ends.
    story.rng.random = lambda: 1.0  # type: ignore[method-assign]
    story.run(20)
    counted = Counter[str]()
    for report in story.reports:
        counted.update(report.skipped)
    assert sum(report.merged for report in story.reports) + counted.total() == story.put
    assert counted["epoch"]
    assert max(report.merged for report in story.reports) in (2, 3)  # one of each sender
    for push in story.pushes:
        weights, epoch = story.after[push.steps]
        assert torch.equal(push.values, weights[push.plan.plan.blocks])
        assert push.epoch == epoch
    for taken in story.snapshots:
        weights, epoch = story.after[taken.steps]
        assert torch.equal(taken.weights, weights)
        assert taken.epoch == epoch
    assert story.landed == story.handed
    assert all(flat.isfinite().all() for flat, _ in story.after.values())
    assert min(len(story.pushes), len(story.snapshots), len(story.landed)) > 10


def late(polls: int) -> tuple[Bench, LateStream]:
    side = LateStream(lambda: polls)
    bench = Bench(side=side)
    bench.steps(2)
    return bench, side


@pytest.mark.parametrize("kind", ["add", "write"])
def test_a_landing_takes_effect_and_is_told_once_its_buffer_is_on_the_device(kind: str) -> None:
    bench, _ = late(polls=2)
    told: list[Landing] = []
    hear(bench.exchange, {LandingDone: lambda landed, held_s: told.append(landed)})
    before, buffer = bench.flat(), torch.ones(NUM_BLOCKS, 64)
    buffer[-1, 6:] = 0  # padding
    bench.exchange.land(landing(kind=kind, buffer=buffer))
    for _ in range(2):
        bench.step()
        bench.deliver_posts()
        assert torch.equal(bench.flat(), before)
        assert (bench.exchange.epoch, bench.exchange.landing_pending, told) == (Epoch("L", 3), True, [])
    bench.step()
    bench.deliver_posts()
    assert torch.equal(bench.flat(), before + buffer if kind == "add" else buffer)
    assert (bench.exchange.epoch, bench.exchange.landing_pending, len(told)) == (Epoch("L", 4), False, 1)
    assert bench.exchange.take_changes().everything


def test_a_fragment_that_was_compared_before_a_landing_is_not_merged_after_it() -> None:
    bench, _ = late(polls=1)
    bench.receive("b")
    assert bench.step(took_s=0.01).merged == 0
    bench.exchange.land(landing())
    before = bench.flat()
    report = bench.step(took_s=0.01)
    assert (report.merged, report.skipped) == (0, {"epoch": 1})
    assert torch.equal(bench.flat(), before)


def test_a_fragment_that_grew_too_old_while_it_was_compared_is_not_merged() -> None:
    bench, _ = late(polls=1)
    bench.receive("b", age_s=0.0)
    assert bench.step(took_s=0.01).skipped == {}
    assert bench.step(took_s=10.0).skipped == {"too_old": 1}


def test_a_fragment_is_mixed_with_the_weights_of_the_step_that_merges_it() -> None:
    bench, _ = late(polls=1)
    arrival = bench.receive(blocks=(2, 7))
    bench.step()
    bench.tensors[0].add_(0.5)
    before = bench.flat()[[2, 7]]
    assert bench.step().merged == 1
    assert torch.equal(bench.flat()[[2, 7]], torch.lerp(before, arrival.values, 0.5))
    assert bench.exchange.take_changes().blocks.tolist() == [2, 7]


def test_fragments_that_end_in_one_step_weigh_the_same_as_our_own() -> None:
    bench, _ = late(polls=1)
    before = bench.flat()[[2, 7]]
    arrivals = [bench.receive(sender, blocks=(2, 7), values=before + by) for sender, by in (("b", 0.01), ("c", 0.02))]
    assert [bench.step().merged for _ in range(2)] == [0, 2]
    mean = sum((arrival.values for arrival in arrivals), before) / 3
    torch.testing.assert_close(bench.flat()[[2, 7]], mean)


def test_of_one_sender_a_step_merges_one_also_if_two_end_in_it() -> None:
    polls = iter((1, 0))
    bench = Bench(side=LateStream(lambda: next(polls)))
    bench.steps(2)
    bench.receive("b", blocks=(2,))
    bench.step()
    bench.receive("b", blocks=(7,))
    assert [bench.step().merged for _ in range(3)] == [1, 1, 0]


def test_a_senders_next_fragment_waits_until_its_last_one_is_merged() -> None:
    polls = iter((2, 0))
    bench = Bench(side=LateStream(lambda: next(polls)))
    bench.steps(2)
    merged = []
    for block in (2, 7):
        bench.receive("b", blocks=(block,))
        merged.append(bench.step(took_s=0.01).merged)
    assert [*merged, *(bench.step(took_s=0.01).merged for _ in range(3))] == [0, 0, 1, 1, 0]


def test_of_one_sender_few_fragments_are_compared_at_a_time() -> None:
    bench, side = late(polls=10)
    for _ in range(MOST_OF_SENDER + 2):
        bench.receive("b")
        bench.step(took_s=0.001)
    assert side.queued == MOST_OF_SENDER


def test_the_memory_for_comparisons_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five fragments of 512 bytes two fit at a time, and one that is larger than that fits alone."""
    monkeypatch.setattr(merging, "MOST_VALUES_BYTES", 1100)
    bench, side = late(polls=1)
    for sender in "bcdef":
        bench.receive(sender, blocks=(2, 7))
    bench.receive("g", blocks=(1, 2, 3, 4, 5))
    reports, queued = [], []
    for _ in range(6):
        reports.append(bench.step(took_s=0.001))
        queued.append(side.queued)
    assert sum(report.merged for report in reports) == 6
    assert queued == [2, 2, 1, 1, 0, 0]


def test_no_more_pushes_begin_than_may_be_under_way() -> None:
    bench, side = late(polls=10)
    pushes: list[Push] = []
    hear(bench.exchange, {Push: pushes.append})
    for _ in range(MOST_PUSHES_UNDER_WAY + 2):
        bench.exchange.offer_push(push_plan(3))
        bench.step()
    assert (side.queued, pushes) == (MOST_PUSHES_UNDER_WAY, [])


def test_late_transfers_cost_no_fragments() -> None:
    """The next push is gathered while one is on its way to the host, and comparisons overlap too."""

    def counts(sides: dict[str, LateStream]) -> list[tuple[int, int]]:
        async def main() -> None:
            async with swarm(dataclasses.replace(RUN, sync_every=1000)) as s:
                s.sides = sides
                s.start("a", founder=True)
                s.start("b")
                await trio.sleep(10)
                for peer in s.peers.values():
                    reports = peer.reports[40:]
                    found.append((sum(report.sent for report in reports), sum(report.merged for report in reports)))

        found: list[tuple[int, int]] = []
        run_virtual(main)
        return found

    at_once, late = counts({}), counts({"a": LateStream(lambda: 1), "b": LateStream(lambda: 2)})
    for (sent, merged), (late_sent, late_merged) in zip(at_once, late, strict=True):
        assert sent > 45
        assert late_sent >= sent - 2
        assert late_merged >= merged - 4


def test_no_snapshot_is_begun_while_a_round_lands() -> None:
    """So it has the epoch of its weights, as it has where a landing takes one step."""
    bench, _ = late(polls=1)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.exchange.land(landing(kind="write", buffer=torch.zeros(NUM_BLOCKS, 64)))
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(NUM_BLOCKS, 64), latest_s=0.0))
    bench.steps(5)
    bench.deliver_posts()
    assert [(snapshot.epoch, snapshot.steps) for snapshot in taken] == [(Epoch("L", 4), 4)]
    assert not taken[0].weights.any()


def test_a_request_that_replaces_another_may_use_its_buffer() -> None:
    bench, _ = late(polls=2)
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    buffer = torch.empty(NUM_BLOCKS, 64)
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=0.0))
    bench.step()
    bench.exchange.want_snapshot(SnapshotWanted(buffer, latest_s=0.0))
    for _ in range(6):
        bench.tensors[0].add_(1.0)
        bench.step()
        if bench.exchange.steps == 6:
            expected = bench.flat()
        bench.deliver_posts()
    assert [snapshot.steps for snapshot in taken] == [6]
    assert torch.equal(taken[0].weights, expected)


def test_without_training_nothing_is_left_under_way() -> None:
    """Leaving, waiting for the end and restoring call `idle` until nothing is under way. It never blocks."""
    bench, side = late(polls=9)
    taken, pushes = list[Snapshot](), list[Push]()
    hear(bench.exchange, {SnapshotTaken: taken.append, Push: pushes.append})
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(NUM_BLOCKS, 64), latest_s=0.0))
    bench.exchange.offer_push(push_plan(3))
    bench.receive("b")
    bench.step()
    before = bench.flat()
    bench.exchange.land(landing(kind="add", buffer=torch.ones(NUM_BLOCKS, 64), finished=True))
    bench.step()
    assert torch.equal(bench.flat(), before)
    while bench.exchange.under_way:
        bench.exchange.idle()
    bench.exchange.idle()
    bench.deliver_posts()
    assert (side.queued, side.waited) == (0, 0)
    assert bench.exchange.finished
    assert torch.equal(bench.flat()[:30], before[:30] + 1)
    assert torch.equal(taken[0].weights, before)
    assert torch.equal(pushes[0].values, before[[3]])


def test_a_device_without_room_is_read_and_written_at_once() -> None:
    bench, side = late(polls=100)
    side.room = False
    taken: list[Snapshot] = []
    hear(bench.exchange, {SnapshotTaken: taken.append})
    bench.receive("b")
    bench.exchange.offer_push(push_plan(3))
    report = bench.step()
    assert (report.sent, report.merged) == (1, 1)
    bench.exchange.land(landing(kind="write", buffer=torch.zeros(NUM_BLOCKS, 64)))
    bench.exchange.want_snapshot(SnapshotWanted(torch.empty(NUM_BLOCKS, 64), latest_s=0.0))
    bench.step()
    bench.deliver_posts()
    assert bench.exchange.epoch == taken[0].epoch == Epoch("L", 4)
    assert not taken[0].weights.any()


@pytest.mark.parametrize("mistake", ["a source was changed", "work was dropped"])
def test_the_stand_in_finds_mistakes(mistake: str) -> None:
    side = LateStream(lambda: 1)
    source, target = torch.ones(2), torch.zeros(2)
    copies: list[Any] = [side.run(lambda: target.copy_(source), reads=[source], writes=[target]) for _ in range(2)]
    assert target.isnan().all()
    if mistake == "a source was changed":
        source += 1
    else:
        del copies[0]
    with pytest.raises(Mistake, match=mistake):
        copies[-1].wait()


def test_late_snapshots_are_in_time_for_rounds_of_peers_with_unequal_steps() -> None:
    """The joining window is a few steps long where steps take seconds, and a late snapshot needs one step more."""

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=10)) as s:
            s.sides = {name: LateStream(lambda: 1) for name in "abc"}
            for name, step_s in {"a": 3.0, "b": 4.0, "c": 6.0}.items():
                s.start(name, founder=name == "a", step_s=step_s)
            await s.until(lambda: len(s.peers["a"].rounds()) >= 4)
            for peer in s.peers.values():
                assert not any(event["late"] for event in peer.rounds())
            assert len(s.peers["a"].rounds()[-1]["contributors"]) == 3

    run_virtual(main)


def test_a_peer_on_a_device_commits_rounds_with_others() -> None:
    """Two ordinary peers, and two whose transfers take up to three steps more: anchors are the mean of the snapshots,
    hashes are equal, and fragments are merged."""

    async def main() -> None:
        delays, witness = random.Random(0), Witness()
        async with swarm(dataclasses.replace(RUN, round_codec="none")) as s:
            s.sides = {name: LateStream(lambda: delays.randrange(4)) for name in "ac"}
            start_all(s, "abcd", witness)
            await s.until(lambda: common(s, 4, 4))
            assert witness.check_values() >= 12
            heads = {p.node.driver.head.state_hash for p in s.peers.values()}
            assert len(heads) <= 2  # one round may just be landing
            for peer in s.peers.values():
                assert len(peer.rounds("committed")) >= 3
                assert not any(event["late"] for event in peer.rounds("committed"))
                assert sum(report.merged for report in peer.reports) > 10

    run_virtual(main)
