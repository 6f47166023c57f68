"""Rounds on the memory network: records, contributors, and their effect on the weights."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
import trio

from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.slices import Slice
from p2ptrain.protocol.rounds.landing import commit
from p2ptrain.protocol.rounds.moving import reducer, snapshot
from p2ptrain.protocol.rounds.moving.leader import AveragingLeader
from p2ptrain.protocol.wire.messages import KIND_OF, KINDS, Attempt, Call, Reduce, Request
from p2ptrain.protocol.wire.transport import Compute
from tests.protocol.swarm import (
    RUN,
    Swarm,
    TestPeer,
    Witness,
    Worker,
    checkpoint_of,
    common,
    run_virtual,
    start_all,
    swarm,
)


def test_four_peers_commit_the_weighted_mean_of_all_four() -> None:
    async def main() -> None:
        witness = Witness()
        async with swarm(dataclasses.replace(RUN, round_codec="none", fragment_fraction=0.0)) as s:
            start_all(s, "abcd", witness)
            await s.until(lambda: common(s, 4, 4))
            assert witness.check_values() >= 12
            heads = {p.node.driver.head.state_hash for p in s.peers.values()}
            assert len(heads) <= 2  # one round may just be landing

    run_virtual(main)


@pytest.mark.parametrize("codec", ["int8", "fp16", "none"])
def test_every_codec_gives_equal_hashes_on_all_peers(codec: str) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, round_codec=codec)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 3, 3))
            by_round = defaultdict(set)
            for peer in s.peers.values():
                for event in peer.rounds("committed"):
                    by_round[event["round"]].add((event["anchor_hash"], event["state_hash"]))
            assert all(len(hashes) == 1 for hashes in by_round.values())

    run_virtual(main)


def test_quantisation_error_stays_in_the_weights() -> None:
    """θ += A′ − A + decode(sent): with one peer and a plain average, the weights do not move at all.

    (fp16, because the mean of one is then encoded without further loss.)
    """

    async def main() -> None:
        run = dataclasses.replace(RUN, outer_lr=1.0, outer_momentum=0.0, fragment_fraction=0.0, round_codec="fp16")
        async with swarm(run) as s:
            peer = s.start("a", founder=True)
            landed: list[tuple[torch.Tensor, torch.Tensor]] = []
            land = peer.exchange._land

            def spy(step_slice: Slice) -> None:
                before, epoch = peer.flat(), peer.exchange.epoch
                land(step_slice)
                if peer.exchange.epoch != epoch:
                    landed.append((before, peer.flat()))

            peer.exchange._land = spy  # type: ignore[method-assign]
            await s.until(lambda: len(landed) >= 3)
            for before, after in landed:
                assert torch.allclose(before, after, atol=2e-7)
            assert all(r["status"] == "solo" for r in peer.rounds())

    run_virtual(main)


def test_a_left_out_member_keeps_its_weights_once_and_adopts_the_anchor_every_second_time() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 1, 4))
            lagging = s.peers["d"]
            landings = []
            land = lagging.exchange.land

            def spy(landing) -> None:  # type: ignore[no-untyped-def]
                landings.append(landing)
                land(landing)

            lagging.exchange.land = spy  # type: ignore[method-assign]
            lagging.exchange.want_snapshot = lambda wanted: None  # type: ignore[method-assign]  # joins without one
            await s.until(lambda: len(landings) >= 4)
            # At the anchor it has not drifted, so that it is left out once more before the next time.
            assert [landing.kind for landing in landings[:4]] == ["keep", "write", "keep", "write"]
            assert landings[1].report.tokens_discarded > 0
            await s.until(lambda: lagging.exchange.epoch.round >= landings[3].epoch.round)
            await s.until(lambda: s.peers["a"].node.driver.head.round >= landings[3].epoch.round + 1)

    run_virtual(main)


def test_a_run_with_a_length_ends_in_one_plain_average_on_all() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=110)) as s:
            start_all(s, "abc")
            await s.until(lambda: all(p.exchange.finished for p in s.peers.values()))
            last = [p.rounds()[-1] for p in s.peers.values()]
            assert len({(e["lineage"], e["round"], e["anchor_hash"]) for e in last}) == 1
            record = s.peers["a"].node.driver.head.record
            assert record is not None
            assert (record.outer_lr, record.outer_momentum, record.run_step) == (1.0, 0.0, 110)
            assert all(p.exchange.run_step == 110 for p in s.peers.values())

    run_virtual(main)


def test_peers_of_different_speeds_end_with_the_same_weights() -> None:
    """A coarse codec leaves an error in the weights, and a slow peer takes steps while the last round is on its way."""

    async def main() -> None:
        run = dataclasses.replace(RUN, total_steps=70, round_codec="int4", fragment_fraction=0.2)
        async with swarm(run) as s:
            for name, step_s in {"a": 0.1, "b": 0.27, "c": 0.4}.items():
                s.start(name, founder=name == "a", step_s=step_s)
            await s.until(lambda: s.peers["a"].exchange.run_step > 60)
            # Too slow for its last interval: it trains on while the round, of visits to a slow worker thread, lasts.
            s.peers["c"].step_s, s.worker.work_s = 1.0, 0.5
            await s.until(lambda: all(p.exchange.finished for p in s.peers.values()))
            await trio.sleep(2)
            for peer in s.peers.values():
                assert torch.equal(peer.flat(), peer.node.state.anchor_tensor())
            assert torch.equal(s.peers["a"].flat(), s.peers["b"].flat())
            last = [peer.rounds()[-1] for peer in s.peers.values()]
            assert [event["late"] for event in last] == [False] * 3
            assert [event["tokens_discarded"] > 0 for event in last] == [False, False, True]

    run_virtual(main)


def test_a_peer_that_missed_the_last_rounds_adopts_the_weights_of_the_others() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=70)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            s.network.partition(["a", "b"], ["c"])
            await s.until(lambda: all(s.peers[name].exchange.finished for name in "ab"))
            s.network.partition()
            late = s.peers["c"]
            await s.until(lambda: late.exchange.finished)
            assert late.node.driver.head.state_hash == s.peers["a"].node.driver.head.state_hash
            assert torch.equal(late.flat(), s.peers["a"].flat())

    run_virtual(main)


def test_intervals_follow_speeds_and_tokens_weigh() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, sync_every=40)) as s:
            s.start("a", founder=True, step_s=0.1)
            s.start("b", step_s=0.2)
            s.start("c", step_s=0.4)
            await s.until(lambda: common(s, 4, 3))
            record = s.peers["a"].node.driver.head.record
            assert record is not None
            intervals = dict(record.intervals)
            assert 70 <= intervals["a"] <= 90
            assert intervals["b"] == 40
            assert 15 <= intervals["c"] <= 25
            weights = {c.peer_id: c.weight for c in record.contributors}
            assert weights["a"] == pytest.approx(2 * weights["b"], rel=0.2)
            steps = [p.exchange.run_step for p in s.peers.values()]
            assert max(steps) - min(steps) <= 40

    run_virtual(main)


async def end_with_one_state(s: Swarm, peers: Collection[TestPeer], within_s: float) -> None:
    """Wait until all have landed the run's last round, and check that they have the same state."""
    await s.until(lambda: all(peer.exchange.finished for peer in peers), within_s=within_s)
    assert len({peer.node.driver.head.state_hash for peer in peers}) == 1


@pytest.mark.parametrize("cut_s", [55, 200])
def test_who_is_cut_off_at_the_end_does_not_end_alone(cut_s: float) -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=1000, total_steps=2000, fragment_fraction=0.0)
        async with swarm(run) as s:
            start_all(s, "abc", step_s=0.1)
            await s.until(lambda: all(peer.exchange.run_step >= 1960 for peer in s.peers.values()), within_s=400)
            s.network.partition(["c"], ["a", "b"])
            await trio.sleep(cut_s)
            s.network.partition()
            await end_with_one_state(s, s.peers.values(), within_s=300)

    run_virtual(main)


def test_a_peer_that_was_restarted_at_the_end_and_is_cut_off_does_not_end_alone() -> None:
    """It has made no step since, so it does not know how long an interval takes."""

    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=400, total_steps=800, fragment_fraction=0.0)
        async with swarm(run) as s:
            start_all(s, "abc", step_s=1.0)
            await s.until(lambda: common(s, 1, 3), within_s=800)
            await s.until(lambda: s.peers["c"].exchange.run_step >= 700, within_s=800)
            s.peers["a"].paused = s.peers["b"].paused = True  # slower
            await s.until(lambda: s.peers["c"].exchange.at_length, within_s=200)
            restored = checkpoint_of(s, "c")
            s.peers["c"].node.leave("interrupted")
            await trio.sleep(0.3)
            s.kill("c")
            await s.until(s.start("c", restored=restored, step_s=1.0).node.ready.is_set)
            await trio.sleep(30)
            s.network.partition(["c"], ["a", "b"])
            await trio.sleep(100)
            s.network.partition()
            s.peers["a"].paused = s.peers["b"].paused = False
            await end_with_one_state(s, s.peers.values(), within_s=400)

    run_virtual(main)


def test_a_peer_that_does_not_take_its_turn_at_the_end_costs_the_others_a_minute() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=40, total_steps=80, fragment_fraction=0.0)
        async with swarm(run) as s:
            start_all(s, "abcd", step_s=30.0)
            await s.until(lambda: common(s, 1, 4), within_s=2000)
            first, second, *left = (peer_id for peer_id, _ in s.peers["a"].node.driver.head.voters)
            idle, last = sorted(left)
            await s.until(lambda: s.peers[last].exchange.run_step >= 79, within_s=2000)
            s.peers[first].paused = s.peers[second].paused = s.peers[idle].paused = True
            await s.until(lambda: s.peers[last].exchange.at_length, within_s=100)
            due_s = trio.current_time()
            await trio.sleep(1000)
            s.kill(first)
            s.kill(second)
            await s.until(lambda: s.peers[last].exchange.finished, within_s=1000)
            assert trio.current_time() - due_s < run.round_timeout_s - 60

    run_virtual(main)


def test_who_was_due_long_before_the_end_and_is_cut_off_there_does_not_end_alone() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=40, total_steps=320, fragment_fraction=0.0)
        async with swarm(run) as s:
            start_all(s, "abc", step_s=10.0)
            await s.until(lambda: common(s, 1, 3), within_s=800)
            s.peers["a"].step_s = s.peers["b"].step_s = 100.0
            await s.until(lambda: s.peers["c"].exchange.at_length, within_s=4000)
            assert not any(peer.rounds("committed")[1:] for peer in s.peers.values())
            s.network.partition(["c"], ["a", "b"])
            await trio.sleep(200)
            assert not s.peers["c"].exchange.finished

    run_virtual(main)


@pytest.mark.parametrize("latency_s", [0.001, 0.15])
def test_those_that_are_left_at_the_end_make_the_last_round_together(latency_s: float) -> None:
    """They run out of patience together: three intervals take 20 minutes, and half of an attempt's time is less."""

    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=400, total_steps=800, fragment_fraction=0.0)
        async with swarm(run, latency_s=latency_s) as s:
            start_all(s, "abcd", step_s=1.0)
            await s.until(lambda: common(s, 1, 4), within_s=800)
            await s.until(lambda: all(peer.exchange.run_step >= 790 for peer in s.peers.values()), within_s=800)
            first, second = (peer_id for peer_id, _ in s.peers["a"].node.driver.head.voters[:2])
            s.kill(first)
            s.kill(second)
            left = [peer for name, peer in s.peers.items() if name not in (first, second)]
            await end_with_one_state(s, left, within_s=1000)
            assert [len(peer.rounds()[-1]["contributors"]) for peer in left] == [2, 2]

    run_virtual(main)


@pytest.mark.parametrize("total_steps", [0, 300])
def test_a_founder_that_is_much_slower_than_those_who_join_it_commits_with_them(total_steps: int) -> None:
    """It alone decides the first round, when the others have made twenty times as many steps."""

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, total_steps=total_steps)) as s:
            s.start("a", founder=True, step_s=2.0)
            for name in "bc":
                s.start(name)
            await s.until(lambda: common(s, 1, 3), within_s=100)
            if total_steps:
                await s.until(lambda: all(p.exchange.finished for p in s.peers.values()))
                assert torch.equal(s.peers["a"].flat(), s.peers["b"].flat())

    run_virtual(main)


def test_a_founder_alone_records_solo_and_others_join_it() -> None:
    async def main() -> None:
        async with swarm() as s:
            founder = s.start("a", founder=True)
            await s.until(lambda: len(founder.rounds("solo")) >= 2)
            assert not founder.rounds("committed")
            late = s.start("b")
            await s.until(lambda: len(late.rounds("committed")) >= 2)
            assert late.exchange.run_step > 40

    run_virtual(main)


def test_the_last_survivor_of_a_quorum_goes_on_alone_and_a_minority_waits() -> None:
    async def main() -> None:
        async with swarm() as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            s.kill("b")
            s.kill("c")
            died = trio.current_time()
            survivor = s.peers["a"]
            lineage = survivor.node.driver.head.lineage
            await trio.sleep(30)
            # One of three voters is no quorum: it trains on, and commits nothing of the old lineage.
            assert not [r for r in survivor.rounds() if r["t"] > died + 15]
            assert survivor.node.driver.head.lineage == lineage
            steps = survivor.exchange.steps
            await s.until(lambda: survivor.node.driver.head.lineage != lineage)
            assert trio.current_time() - died > 55
            assert survivor.exchange.steps > steps
            await s.until(lambda: bool([r for r in survivor.rounds("solo") if r["lineage"] != lineage]))

    run_virtual(main)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_voter_that_was_started_anew_is_not_waited_for(rounds: int) -> None:
    """Without the first listed voter (before the first round: the only one) there is no quorum, and none can come."""

    async def main() -> None:
        async with swarm() as s:
            start_all(s, "ab")
            await s.until(lambda: s.peers["b"].node.ready.is_set() and common(s, rounds, 2))
            lineage = s.peers["b"].node.driver.head.lineage
            s.kill("a")
            await trio.sleep(8)
            assert s.peers["b"].node.driver.head.lineage == lineage
            s.start("a")
            back = trio.current_time()
            await s.until(
                lambda: all(
                    any(r["t"] > back and not r["late"] for r in p.rounds("committed")) for p in s.peers.values()
                ),
                within_s=25,
            )
            assert s.peers["a"].node.driver.head.lineage != lineage

    run_virtual(main)


def test_the_time_of_a_round_that_was_missed_counts_from_its_record() -> None:
    async def main() -> None:
        async with swarm() as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            deaf = s.peers["c"]
            s.network.fault = lambda source, target, packet: (
                PacketFault.DROP if target == "c" and packet[1] == KIND_OF[Call] else PacketFault.NONE
            )
            await s.until(lambda: [r["late"] for r in deaf.rounds("committed")][-2:] == [True, True])
            before, last = deaf.rounds("committed")[-2:]
            assert 0 <= last["wall_s"] < 0.5 * (last["t"] - before["t"])

    run_virtual(main)


def test_leaving_hands_the_run_over_at_once() -> None:
    async def main() -> None:
        async with swarm() as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            for name in "bc":
                s.peers[name].node.leave("done")
            await trio.sleep(0.2)
            for name in "bc":
                s.kill(name)
            left = trio.current_time()
            survivor = s.peers["a"]
            await s.until(lambda: bool([r for r in survivor.rounds("solo") if r["t"] > left]))
            assert trio.current_time() - left < 10

    run_virtual(main)


def test_a_call_that_comes_at_the_moment_of_joining_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are delivered from the moment a peer is ready: what they need has to be there."""

    async def main() -> None:
        async with swarm() as s:
            founder = s.start("a", founder=True)
            await s.until(lambda: bool(founder.rounds("solo")))
            joiner = s.start("b")
            ready, driver = joiner.node.ready, joiner.node.driver

            class Ready:
                """Tells that `b` is ready, and `a` calls it to a round in that instant."""

                is_set, wait = ready.is_set, ready.wait

                def set(self) -> None:
                    ready.set()
                    driver.deliver("a", Call(driver.head.lineage, driver.head.round + 1, Attempt(7, "a", "a.1"), 0.5))

            monkeypatch.setattr(joiner.node, "ready", Ready())
            await s.until(lambda: common(s, 2, 2))

    run_virtual(main)


@pytest.mark.slow
def test_after_a_while_a_peer_keeps_only_the_parts_that_it_averaged() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=1000, fragment_fraction=0.0)
        async with swarm(run) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2), within_s=400)
            record = s.peers["a"].node.driver.head.record
            assert record is not None
            kept = {name: peer.node.driver.context.parts._parts for name, peer in s.peers.items()}
            assert all(len(parts) == len(record.parts) == 2 for parts in kept.values())
            await trio.sleep(40)
            for name, peer in s.peers.items():
                own = {part.digest for part in record.parts if part.holder == name}
                assert set(peer.node.driver.context.parts._parts) == own
            # A late member still finds every part.
            await s.peers["b"].node.driver.context.parts.fetch(record, ["a"])

    run_virtual(main)


def test_a_slow_reducer_averages_whom_its_leader_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order comes while the last chunks of the expected mean are in a worker thread, which is not cancelled."""
    caplog.set_level(logging.DEBUG, "p2ptrain.protocol.rounds")
    guarded, whole = AveragingLeader._guarded, reducer.in_parallel
    monkeypatch.setattr(
        AveragingLeader, "_guarded",
        lambda self, joins, included: guarded(self, joins, [member for member in included if member != "c"]),
    )  # fmt: skip

    async def slow_to_average(compute: Compute, work: Callable[..., Any], pieces: Sequence[Any]) -> list[Any]:
        if work.__name__ != "average":
            return await whole(compute, work, pieces)
        with trio.CancelScope(shield=True):
            await trio.sleep(0.5)
        return [work(piece) for piece in pieces]

    monkeypatch.setattr(reducer, "in_parallel", slow_to_average)

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            for name in "abc":
                s.start(name)
            await s.until(lambda: common(s, 6, 2), within_s=60)
            assert all(r["contributors"] == ["a", "b"] for r in s.peers["c"].rounds("committed")[-4:])

    run_virtual(main)
    assert "attempt" not in caplog.text


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_round_takes_four_round_trips_from_its_call(size: int) -> None:
    """Call, Join; Roster, chunks; Arrived and Reduced, Propose; Ready, Commit. The means come meanwhile."""
    round_trip_s = 0.4

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=200)) as s:
            s.network.latency = lambda a, b: round_trip_s / 2  # type: ignore[method-assign]
            called_s: list[float] = []
            more: list[str] = []

            def watch(source: str, target: str, packet: bytes) -> PacketFault:
                if KINDS[packet[1]] is Call:
                    called_s.append(trio.current_time())
                if KINDS[packet[1]] is Reduce or (KINDS[packet[1]] is Request and b"part" in packet):
                    more.append(source)
                return PacketFault.NONE

            for name in "abcdefgh"[:size]:
                s.start(name, step_s=0.05)
            await s.until(lambda: all(len(p.rounds("committed")) >= 2 for p in s.peers.values()), within_s=60)
            s.network.fault = watch
            await s.until(lambda: all(len(p.rounds("committed")) >= 3 for p in s.peers.values()), within_s=60)
            landed_s = max(p.rounds("committed")[2]["t"] for p in s.peers.values())
            assert all(p.rounds("committed")[2]["group_size"] == size for p in s.peers.values())
            # A snapshot and a landing each wait for the end of a step.
            assert landed_s - max(called_s) <= 4 * round_trip_s + 2 * 0.05 + 0.01
            assert not more

    run_virtual(main)


def test_an_outer_step_waits_for_what_an_attempt_has_begun_in_worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It overwrites the chunks that they read, and the anchor. One member encodes for longer than the others wait."""
    running, at_steps = 0, list[int]()
    whole, step = snapshot.in_parallel, commit.step_chunk

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            context = {name: s.start(name).node.driver.context for name in "abc"}["c"]
            context.compute = Worker()

            async def slow_to_encode(compute: Compute, work: Callable[..., Any], pieces: Sequence[Any]) -> list[Any]:
                nonlocal running
                if compute is not context.compute:
                    return await whole(compute, work, pieces)
                running += 1
                with trio.CancelScope(shield=True):
                    await trio.sleep(20)
                running -= 1
                return [work(piece) for piece in pieces]

            def noting(state: AnchorState, *args: Any) -> None:
                if state is context.state:
                    at_steps.append(running)
                step(state, *args)

            monkeypatch.setattr(snapshot, "in_parallel", slow_to_encode)
            monkeypatch.setattr(commit, "step_chunk", noting)
            await s.until(lambda: len(s.peers["c"].rounds("committed")) >= 3, within_s=300)

    run_virtual(main)
    assert at_steps
    assert not any(at_steps)


@pytest.mark.parametrize(("names", "silent"), [("ab", "b"), ("ab", "ab"), ("abc", "c"), ("abc", "bc")])
def test_a_loop_that_reports_no_samples_is_warned_if_others_report_some(
    names: str, silent: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds go on, whether few loops report none or most."""
    warned = names != silent

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            start_all(s, names)
            for name in silent:
                exchange = s.peers[name].exchange
                monkeypatch.setattr(exchange, "step", lambda samples, step=exchange.step: step(0))
            await s.until(lambda: common(s, 3, len(names)))

    run_virtual(main)
    assert ("pass `samples` to step()" in caplog.text) == warned
    assert ("samples" in caplog.text) == warned
