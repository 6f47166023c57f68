"""No stranger that makes up a start or its rounds wins a peer, or keeps peers apart."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import trio

from p2ptrain.protocol.wire.messages import Beat
from tests.protocol.state_sync.starts import PLAIN, abet, geneses, keep_dialling, lie, start_anew
from tests.protocol.swarm import run_virtual, start_all, swarm


def test_one_stranger_wins_no_peer_of_a_larger_start() -> None:
    """A start that has a round already, against that of three peers that has none."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=300)) as s:
            s.network.partition(["d", "e", "f"], ["x"])
            for name in "def":
                s.start(name, chosen=["bootstrap"])
            s.start("x", founder=True, step_s=0.01)
            await s.until_joined()
            genesis = geneses(s, "def")
            await s.until(lambda: bool(s.peers["x"].rounds()))
            s.network.partition()
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "def"))
            assert geneses(s, "def") == genesis != geneses(s, "x")

    run_virtual(main)


@pytest.mark.parametrize("how", ["rooted", "unrooted", "theirs"])
@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
@pytest.mark.parametrize("seed", range(2))
def test_made_up_rounds_take_neither_a_restarted_founder_nor_its_members(
    initial_peer: str, seed: int, how: str
) -> None:
    """The members have rounds, and are linked with it soon after the stranger."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            for name in "bcd":
                s.start(name, chosen=[initial_peer])
            s.start("x", chosen=["a"])
            await s.until_joined()
            s.peers["x"].paused = True  # it never contributes
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abcd"), within_s=200)
            s.kill("a")
            lied = await lie(s, "x", how)
            await trio.sleep(4)
            s.start("a", founder=True)
            await trio.sleep(60)
            heads = [s.peers[name].node.driver.head for name in "abcd"]
            assert all(head.round < lied.round for head in heads)
            assert len({head.genesis for head in heads}) == 1
            assert not any(s.peers[name].exchange.finished for name in "abcd")

    run_virtual(main, seed)


@pytest.mark.parametrize("lead", [0, 1, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_a_joiner_takes_the_state_that_most_members_have(lead: int, seed: int) -> None:
    """It was given a bootstrap node only, and one member makes up a round of their lineage."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            start_all(s, "abcdx")
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abcdx"), within_s=200)
            for peer in s.peers.values():
                peer.paused = True  # no round comes while the newcomer joins
            await trio.sleep(1)
            await lie(s, "x", "theirs", s.peers["a"].node.driver.head.round + lead)
            e = s.start("e", chosen=["bootstrap"])
            await s.until(e.node.ready.is_set, within_s=30)
            assert e.node.driver.head.state_hash == s.peers["a"].node.driver.head.state_hash

    run_virtual(main, seed)


def test_members_whose_run_goes_on_do_not_follow_a_founder_that_a_stranger_took() -> None:
    """It met the stranger alone."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            for name in "bcx":
                s.start(name, chosen=["a"])
            await s.until_joined()
            s.peers["x"].paused = True
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abc"), within_s=200)
            s.kill("a")
            s.network.partition(["b", "c"], ["a", "x"])
            lied = await lie(s, "x", "rooted")
            s.start("a", founder=True)
            await s.until(lambda: s.peers["a"].node.driver.head.lineage == lied.lineage, within_s=30)
            s.network.partition()
            await trio.sleep(60)
            assert all(s.peers[name].node.driver.head.round < lied.round for name in "bc")

    run_virtual(main)


@pytest.mark.parametrize(("down_s", "lost"), [(12, "acdxy"), (100, "acdxy"), (60, "acd")])
def test_a_member_that_was_cut_off_does_not_follow_two_strangers_that_it_meets_first(down_s: float, lost: str) -> None:
    """It has no initial peers, and they show one made-up round."""

    async def main() -> None:
        async with swarm(PLAIN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            await s.until_joined("a")
            for name in "bcd":
                s.start(name, remembered=["a"])
            for name in "xy":
                s.start(name, chosen=["a"]).paused = True
            await s.until_joined()
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abcd"), within_s=200)
            lied = await lie(s, "x", "unrooted")
            await abet(s, "y", "x")
            s.network.partition(["b"], list(lost))
            await trio.sleep(down_s)
            s.network.partition()
            for name in "xy":
                nursery.start_soon(keep_dialling, s, name, "b")
            rounds = len(s.peers["b"].rounds("committed"))
            await s.until(lambda: len(s.peers["b"].rounds("committed")) > rounds, within_s=100)
            assert s.peers["b"].node.driver.head.round < lied.round
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(("founder", "member"), [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("sync_every", [400, 900])
def test_no_stranger_keeps_a_founder_and_its_member_apart(sync_every: int, founder: str, member: str) -> None:
    """It shows a lineage of its own in the member's start."""

    async def main() -> None:
        names = {founder, member}
        async with swarm(dataclasses.replace(PLAIN, sync_every=sync_every)) as s:
            s.start(founder, founder=True)
            await s.until_joined(founder)
            s.start(member, chosen=[founder])
            x = s.start("x", chosen=[founder])
            made_up, make_beat = f"1-{'f' * 16}", x.node.make_beat

            def lie(sent_s: float, echo_s: float, held_s: float) -> Beat:
                beat = make_beat(sent_s, echo_s, held_s)
                return msgspec.structs.replace(beat, lineage=made_up if beat.lineage else "")

            x.node.make_beat = lie  # type: ignore[method-assign]
            await s.until_joined()
            x.paused = True
            await start_anew(s, founder)
            s.network.partition()
            await s.until(lambda: len(geneses(s, names)) == 1, within_s=30)
            for name in names:
                beat = s.peers[name].node.links.live["x"].beat
                assert beat is not None
                assert beat.lineage == made_up

    run_virtual(main)
