"""A run that was started twice, by peers that had not met: it becomes one before the first rounds, or says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import pytest
import torch
import trio

from p2ptrain.memory_network.network import MemoryDirectory
from tests.protocol.swarm import RUN, Swarm, after, common, run_virtual, swarm

PLAIN = dataclasses.replace(RUN, sync_every=100, fragment_fraction=0.0)


def _geneses(s: Swarm, names: Collection[str]) -> set[str]:
    return {s.peers[name].node.driver.head.genesis for name in names}


async def _start_twice(s: Swarm) -> None:
    """Two pairs of peers, joined through one bootstrap node, do not reach each other: each founds the run."""
    s.network.partition(["a", "d"], ["b", "c"])
    for name in "abcd":
        s.start(name, chosen=["bootstrap"])
    await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()), within_s=20)
    assert len(_geneses(s, "abcd")) == 2


@pytest.mark.parametrize("same_weights", [False, True])
def test_founders_that_meet_before_their_first_rounds_train_together(same_weights: bool) -> None:
    """Where both began with the same weights, what was trained since is kept too."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.same_weights = same_weights
            await _start_twice(s)
            await trio.sleep(5)
            for peer in s.peers.values():
                peer.paused = True
            await trio.sleep(1)
            before = {name: peer.flat() for name, peer in s.peers.items()}
            s.network.partition()
            await s.until(lambda: len(_geneses(s, "abcd")) == 1, within_s=5)
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
            await _start_twice(s)
            await s.until(lambda: common(s, 1, 2))
            s.network.partition()
            await trio.sleep(120)
            assert len(_geneses(s, "abcd")) == 2
            assert len(_geneses(s, "ad")) == len(_geneses(s, "bc")) == 1

    run_virtual(main)
    told = [record.getMessage() for record in caplog.records if "another start" in record.getMessage()]
    assert len(told) == 4
    assert "a trains another start of run 'test', which a founded: the swarm is split" in " ".join(told)


def test_a_peer_that_is_linked_with_its_initial_peer_follows_no_other_start() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.network.partition(["z", "b"], ["x", "y"])
            s.start("x", founder=True, step_s=0.02)
            s.start("y", step_s=0.02)
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "xy"))
            s.start("z", founder=True)
            s.start("b", chosen=["z"])
            await s.until(s.peers["b"].node.ready.is_set)
            s.network.partition()
            await s.until(lambda: {"x", "y", "z"} <= set(s.peers["b"].node.links.live))
            assert s.peers["b"].node.driver.head.round < 0
            await s.until(lambda: common(s, 2, 2))
            assert _geneses(s, "b") == _geneses(s, "z") != _geneses(s, "x") == _geneses(s, "y")

    run_virtual(main)


def test_peers_that_start_at_once_on_a_slow_directory_found_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lookup of each ends before the other one is announced."""
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
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()), within_s=20)
            founded = [e for p in s.peers.values() for e in p.events if e["event"] == "adopt" and e["founded"]]
            assert len(founded) == 1

    run_virtual(main)
