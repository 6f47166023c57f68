"""A run that was started twice, by peers that had not met, becomes one before the first rounds, or its peers warn."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import pytest
import torch
import trio

from p2ptrain.memory_network.network import MemoryDirectory
from tests.protocol.state_sync.starts import PLAIN, geneses, start_twice
from tests.protocol.swarm import RUN, after, checkpoint_of, common, run_virtual, start_all, swarm


@pytest.mark.parametrize("same_weights", [False, True])
def test_founders_that_meet_before_their_first_rounds_train_together(same_weights: bool) -> None:
    """Where both began with the same weights, what was trained since is kept too."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400)) as s:
            s.same_weights = same_weights
            await start_twice(s)
            await trio.sleep(5)
            for peer in s.peers.values():
                peer.paused = True
            await trio.sleep(1)
            before = {name: peer.flat() for name, peer in s.peers.items()}
            s.network.partition()
            await s.until(lambda: len(geneses(s, "abcd")) == 1, within_s=20)
            await trio.sleep(1)
            for peer in s.peers.values():
                peer.exchange.idle()  # a replaced state lands
            kept = [torch.equal(peer.flat(), before[name]) for name, peer in s.peers.items()]
            assert sum(kept) == (4 if same_weights else 2)
            for peer in s.peers.values():
                peer.paused = False
            now = trio.current_time()
            await s.until(lambda: after(s, now, 4))
            assert [peer.rounds()[0]["group_size"] for peer in s.peers.values()] == [4] * 4

    run_virtual(main)


def test_starts_that_meet_after_their_first_rounds_stay_apart_and_each_peer_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            await start_twice(s)
            await s.until(lambda: common(s, 1, 2))
            s.network.partition()
            await trio.sleep(120)
            assert len(geneses(s, "abcd")) == 2
            assert len(geneses(s, "ad")) == len(geneses(s, "bc")) == 1

    run_virtual(main)
    told = [record.getMessage() for record in caplog.records if "another start" in record.getMessage()]
    assert len(told) == 4
    assert all("trains another start of run 'test': the swarm is split" in text for text in told)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_peer_that_met_its_initial_peer_follows_no_other_start(is_lost: bool) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.network.partition(["z", "b"], ["x", "y"])
            s.start("x", founder=True, step_s=0.02)
            s.start("y", step_s=0.02)
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "xy"))
            s.start("z", founder=True)
            s.start("b", chosen=["z"])
            await s.until_joined("b")
            genesis = geneses(s, "z")
            if is_lost:
                s.kill("z")
            s.network.partition()
            await s.until(lambda: {"x", "y"} <= set(s.peers["b"].node.links.live))
            assert s.peers["b"].node.driver.head.round < 0
            await s.until(lambda: len(s.peers["b"].rounds()) >= 2)
            assert geneses(s, "b") == genesis != geneses(s, "x") == geneses(s, "y")

    run_virtual(main)


def test_starts_that_follow_one_after_the_other_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until(lambda: bool(s.peers["a"].rounds()))
            for number, name in enumerate("bcd"):
                s.network.partition(["a", *"bcd"[:number]], [name])
                s.start(name, chosen=["bootstrap"])
                await s.until_joined(name)
                assert geneses(s, name) != geneses(s, "a")
                s.network.partition()
                await s.until(lambda: len(geneses(s, s.peers)) == 1)
                await trio.sleep(20)

    run_virtual(main)
    assert "another start" not in caplog.text


def test_a_first_round_waits_for_the_state_of_another_start_that_is_being_downloaded() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=150)) as s:
            await start_twice(s)
            s.network.bandwidth_bytes_s = 50e3
            s.network.partition()
            await s.until(lambda: common(s, 1, 1), within_s=400)
            await s.until(lambda: len(geneses(s, "abcd")) == 1, within_s=5)

    run_virtual(main)


def test_a_state_of_another_start_that_comes_too_slowly_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one state is downloaded at a time: a slow donor would keep the peer from catching up in its own run."""
    monkeypatch.setattr("p2ptrain.protocol.state_sync.state_sync.FOLLOWING_PATIENCE_S", 1.0)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=150)) as s:
            await start_twice(s)
            s.network.bandwidth_bytes_s = 5e3
            s.network.partition()
            await s.until(lambda: "did not come within 1 s" in caplog.text, within_s=100)
            s.network.bandwidth_bytes_s = 1e9
            await s.until(lambda: common(s, 1, 1), within_s=100)

    caplog.set_level(logging.DEBUG)
    run_virtual(main)


def test_a_node_that_is_restarted_before_the_first_round_joins_the_larger_start() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
            await start_twice(s)
            saved = checkpoint_of(s, "d")
            s.kill("d")
            s.kill("a")
            s.network.partition()
            d = s.start("d", restored=saved, chosen=["bootstrap"])
            await s.until(d.node.ready.is_set)
            assert len(geneses(s, "bcd")) == 1

    run_virtual(main)


def test_a_pairwise_run_before_its_last_round_is_no_fresh_one() -> None:
    """It has no round until its end; two of its peers do not leave their work for a larger start of three."""

    async def main() -> None:
        run = dataclasses.replace(RUN, averaging="pairwise", outer_optimizer="sgdm", total_steps=100_000)
        async with swarm(run) as s:
            s.network.partition(["a", "b"], ["x", "y", "z"])
            for name in "abxyz":
                s.start(name, chosen=["bootstrap"])
            await s.until_joined()
            before = geneses(s, "ab")
            await trio.sleep(30)
            s.network.partition()
            await s.until(lambda: set("xyz") <= set(s.peers["a"].node.links.live))
            await trio.sleep(30)
            assert geneses(s, "ab") == before != geneses(s, "xyz")

    run_virtual(main)


def test_each_peer_of_three_starts_says_that_there_are_others(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.network.partition(*(["a"], ["b"], ["c"]))
            for name in "abc":
                s.start(name, founder=True)
            await s.until(lambda: all(peer.rounds() for peer in s.peers.values()))
            s.network.partition()
            await trio.sleep(60)

    run_virtual(main)
    assert sum("another start" in record.getMessage() for record in caplog.records) == 3


def test_a_restarted_peer_that_meets_a_stranger_before_it_is_announced_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announce = MemoryDirectory.announce

    async def slow_announce(self: MemoryDirectory, key: str, value: bytes, expires_in_s: float) -> bool:
        await trio.sleep(5 * (self._peer_id == "a"))
        return await announce(self, key, value, expires_in_s)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until(lambda: bool(s.peers["a"].rounds()))
            saved = checkpoint_of(s, "a")
            s.kill("a")
            s.start("x", founder=True)
            await s.until_joined("x")
            monkeypatch.setattr(MemoryDirectory, "announce", slow_announce)
            a = s.start("a", restored=saved, remembered=["x"])
            await s.until(a.node.ready.is_set, within_s=30)

    run_virtual(main)


def test_a_restarted_peer_finds_the_run_through_one_that_it_remembers() -> None:
    """The directory has lost all records, and does not store any."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2))
            saved = checkpoint_of(s, "a")
            s.kill("a")
            s.network.close_directory()
            genesis = geneses(s, "b")
            a = s.start("a", restored=saved, remembered=["b"])
            await s.until(a.node.ready.is_set, within_s=10)
            assert geneses(s, "a") == genesis
            assert not [e for e in a.events if e["event"] == "adopt" and "restarted" in e["reason"]]
            now = trio.current_time()
            await s.until(lambda: after(s, now, 2))

    run_virtual(main)


def test_peers_that_start_at_once_on_a_slow_directory_found_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lookup of each reads the directory before the other one is announced."""
    announce, lookup = MemoryDirectory.announce, MemoryDirectory.lookup

    async def slow_announce(self: MemoryDirectory, key: str, value: bytes, expires_in_s: float) -> bool:
        await trio.sleep(3)
        return await announce(self, key, value, expires_in_s)

    async def slow_lookup(self: MemoryDirectory, key: str) -> Mapping[str, bytes]:
        found = await lookup(self, key)
        await trio.sleep(3)
        return found

    monkeypatch.setattr(MemoryDirectory, "announce", slow_announce)
    monkeypatch.setattr(MemoryDirectory, "lookup", slow_lookup)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            for name in "abcd":
                s.start(name, chosen=["bootstrap"])
            await s.until_joined(within_s=20)
            founded = [e for p in s.peers.values() for e in p.events if e["event"] == "adopt" and e["founded"]]
            assert len(founded) == 1

    run_virtual(main)
