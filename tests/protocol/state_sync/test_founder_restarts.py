"""A founder that starts anew goes back to its first start, or those who know it go with it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import trio

from p2ptrain.protocol.rounds.deciding import history
from p2ptrain.protocol.state_sync import provenance, transfer
from tests.protocol.state_sync.starts import PLAIN, geneses, start_anew, stay_away
from tests.protocol.state_sync.test_provenance import checkpoint_of
from tests.protocol.swarm import Swarm, after, common, run_virtual, start_all, swarm


def test_a_founder_that_is_restarted_before_the_first_round_keeps_its_run() -> None:
    """It was given no initial peers. When it comes back, it meets a stranger that has committed rounds."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
            s.network.partition(["a", "b"], ["x"])
            start_all(s, "ab")
            s.start("x", founder=True, step_s=0.01)
            await s.until_joined()
            await s.until(lambda: bool(s.peers["x"].rounds()))
            genesis, saved = geneses(s, "a"), checkpoint_of(s, "a")
            s.kill("a")
            s.network.partition(["b"], ["a", "x"])
            await trio.sleep(1)
            a = s.start("a", restored=saved, remembered=["b"])
            await s.until(a.node.ready.is_set)
            s.network.partition()
            await s.until(lambda: {"a", "x"} <= set(s.peers["b"].node.links.live))
            await trio.sleep(20)
            assert geneses(s, "a") == genesis != geneses(s, "x")

    run_virtual(main)


@pytest.mark.parametrize(("founder", "member"), [("a", "b"), ("b", "a")])
def test_a_founder_that_starts_anew_before_the_first_round_and_its_member_become_one(founder: str, member: str) -> None:
    """Both starts are as large: the one with the smaller id goes on."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400)) as s:
            s.start(founder, founder=True)
            s.start(member, chosen=[founder])
            await s.until_joined()
            await start_anew(s, founder, member)
            smaller = {min(geneses(s, "ab"))}
            s.network.partition()
            await s.until(lambda: geneses(s, "ab") == smaller, within_s=20)
            assert not s.peers[founder].rounds()
            await s.until(lambda: common(s, 1, 2))

    run_virtual(main)


def test_a_founder_that_starts_anew_follows_those_who_went_on_with_its_first_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They have a round, and it has none."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=600)) as s:
            s.start("a", founder=True)
            s.start("b", step_s=0.02)
            await s.until_joined()
            s.kill("a")
            await s.until(lambda: bool(s.peers["b"].rounds()), within_s=300)
            first = geneses(s, "b")
            s.network.partition(["a"], ["b"])
            s.start("a", founder=True)
            await s.until_joined("a")
            assert geneses(s, "a") != first
            s.network.partition()
            await s.until(lambda: geneses(s, "ab") == first, within_s=20)
            now = trio.current_time()
            await s.until(lambda: after(s, now, 2), within_s=300)

    caplog.set_level(logging.WARNING)
    run_virtual(main)
    assert "joined the start of run 'test' that a founded" in caplog.text
    # The founder's id is in them, and stays.
    assert "Tickets" not in caplog.text


def test_a_founder_of_many_does_not_follow_one_who_went_on_with_its_first_start() -> None:
    """Anybody who had its genesis can claim rounds of it."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=600)) as s:
            s.start("a", founder=True)
            s.start("z", step_s=0.02)
            await s.until_joined()
            s.kill("a")
            await s.until(lambda: bool(s.peers["z"].rounds()), within_s=300)
            s.network.partition(["a", "b", "c"], ["z"])
            s.start("a", founder=True)
            for name in "bc":
                s.start(name, chosen=["bootstrap"])
            await s.until_joined(*"abc")
            second = geneses(s, "abc")
            assert len(second) == 1
            s.network.partition()
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "abc"), within_s=120)
            assert geneses(s, "abc") == second != geneses(s, "z")

    run_virtual(main)


async def _restart_beside_newcomers(s: Swarm, newcomers: str) -> tuple[set[str], set[str]]:
    """b and c join what a started; a starts it anew three times, at last beside newcomers.

    Returns the first start and the last.
    """
    s.start("a", founder=True)
    await s.until_joined("a")
    for name in "bc":
        s.start(name, chosen=["a"])
    await s.until_joined()
    first = geneses(s, "a")
    for _ in range(2):
        s.kill("a")
        await trio.sleep(2)
        s.start("a", founder=True)
        await s.until(lambda: geneses(s, "abc") == first, within_s=20)
    s.kill("a")
    s.network.partition(["b", "c"], ["a", *newcomers])
    s.start("a", founder=True)
    await s.until_joined("a")
    for name in newcomers:
        s.start(name, chosen=["a"])
    await s.until_joined()
    starts = first, geneses(s, "a")
    s.network.partition()
    return starts


@pytest.mark.parametrize("newcomers", ["", "d", "de"])
def test_a_founder_that_starts_anew_goes_back_to_its_members_unless_newcomers_are_more(newcomers: str) -> None:
    """Of two starts that are as large the one with the smaller id goes on."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=500)) as s:
            first, last = await _restart_beside_newcomers(s, newcomers)
            await s.until(lambda: len(geneses(s, s.peers)) == 1, within_s=40)
            assert geneses(s, "a") == {"": first, "d": {min(first | last)}, "de": last}[newcomers]

    run_virtual(main)


@pytest.mark.parametrize("newcomers", ["d", "de", "def"])
def test_members_and_newcomers_that_see_only_the_founder_become_one(newcomers: str) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400)) as s:
            connected = s.network.connected

            def in_reach(a: str, b: str) -> bool:
                is_across = {a, b} & set("bc") and {a, b} & set(newcomers)
                return connected(a, b) and not is_across

            s.network.connected = in_reach  # type: ignore[method-assign]
            await _restart_beside_newcomers(s, newcomers)
            await s.until(lambda: len(geneses(s, s.peers)) == 1, within_s=40)

    run_virtual(main)


def test_nobody_goes_for_ever_with_a_founder_that_starts_the_run_again_and_again() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=300)) as s:
            start_all(s, "abc")
            await s.until_joined()
            for _ in range(20):
                s.kill("a")
                await trio.sleep(4)
                s.start("a", founder=True)
                await trio.sleep(4)
            assert all(s.peers[name].rounds("committed") for name in "bc")

    run_virtual(main)


def test_a_peer_without_a_round_that_meets_its_founders_second_start_comes_back_with_it() -> None:
    """Another member has a round of the first start."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=200)) as s:
            start_all(s, "abc")
            await s.until_joined()
            s.network.partition(["a", "b"], ["c"])
            await s.until(lambda: bool(s.peers["b"].rounds("committed")))
            first = geneses(s, "b")
            await start_anew(s, "a", "b", "c")
            s.network.partition()
            await s.until(lambda: geneses(s, "abc") == first, within_s=60)

    run_virtual(main)


def test_a_member_that_continues_the_run_from_its_checkpoint_does_not_follow_the_founder() -> None:
    """Its user started the run again, as the founder's did."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
            s.start("a", founder=True)
            s.start("b")
            await s.until_joined()
            await trio.sleep(20)
            first, saved = geneses(s, "a"), checkpoint_of(s, "b")
            for name in "ab":
                s.kill(name)
            s.network.partition(["a"], ["b"])
            s.start("b", restored=saved, founder=True)
            s.start("a", founder=True)
            await s.until_joined(within_s=60)
            assert geneses(s, "a") != first == geneses(s, "b")
            s.network.partition()
            await trio.sleep(30)
            assert geneses(s, "b") == first

    run_virtual(main)


def test_who_named_a_founder_goes_with_it_to_the_larger_start() -> None:
    """Whatever the ids of the two starts."""

    def end(names: str) -> None:
        founder, member, *others = names

        async def main() -> None:
            async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
                s.network.partition([founder, member], others)
                s.start(founder, chosen=["bootstrap"])
                await s.until_joined(founder)
                s.start(member, chosen=[founder])
                for name in others:
                    s.start(name, chosen=["bootstrap"])
                await s.until_joined()
                larger = geneses(s, others)
                assert len(larger) == 1
                s.network.partition()
                await s.until(lambda: geneses(s, names) == larger, within_s=60)

        run_virtual(main)

    end("abcde")
    end("edcba")


@pytest.mark.parametrize("members", ["b", "bc"])
@pytest.mark.parametrize("seed", range(2))
def test_a_founder_goes_back_to_members_with_rounds_also_if_newcomers_are_as_many(seed: int, members: str) -> None:
    """They come before it has been linked with the members for long; its signature on the first round is proof."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            for name in members:
                s.start(name, chosen=["a"])
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in members), within_s=200)
            first = geneses(s, "b")
            s.kill("a")
            await trio.sleep(2)
            s.start("a", founder=True)
            await trio.sleep(2.5)
            for name in "de"[: len(members)]:
                s.start(name, chosen=["a"])
            await trio.sleep(60)
            assert geneses(s, s.peers) == first

    run_virtual(main, seed)


@pytest.mark.parametrize(("who", "members"), [("founder", "bc"), ("founder", "bcd"), ("newcomer", "bcd")])
def test_members_whose_histories_no_longer_reach_the_genesis_are_believed_together(
    who: str, members: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A founder that starts anew, or a newcomer that was cut off and has founded the run, finds the old run."""
    for module in (history, provenance):
        monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    monkeypatch.setattr(provenance, "RECENT_ENTRIES", 3)
    for module in (provenance, transfer):
        monkeypatch.setattr(module, "PAGE_ENTRIES", 1)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            for name in members:
                s.start(name, chosen=["bootstrap"])
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 6 for name in members), within_s=200)
            first = geneses(s, "b")
            if who == "founder":
                s.kill("a")
                await trio.sleep(2)
                s.start("a", founder=True)
            else:
                s.network.partition(["a", *members], ["e"])
                s.start("e", chosen=["bootstrap"])
                await s.until_joined("e")
                s.network.partition()
            await trio.sleep(60)
            assert geneses(s, s.peers) == first

    run_virtual(main)


def test_nobody_leaves_a_new_start_for_an_abandoned_one_that_a_stranger_shows() -> None:
    """Its rounds are real, and signed by the founder too."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True, step_s=0.01)
            await s.until_joined("a")
            s.start("b", chosen=["a"], step_s=0.01)
            s.start("x", chosen=["a"])
            s.peers["x"].paused = True
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "ab"))
            await trio.sleep(1)
            old = geneses(s, "a")
            s.kill("a")
            s.kill("b")
            stay_away(s, "x")
            s.network.partition(["x"], ["a", "b", "c", "d"])
            await trio.sleep(30)
            s.start("a", founder=True)
            await s.until_joined("a")
            for name in "bcd":
                s.start(name, chosen=["a"])
            await s.until_joined("a", "b", "c", "d")
            new = geneses(s, "abcd")
            s.network.partition()
            await trio.sleep(30)
            assert geneses(s, "abcd") == new != old

    run_virtual(main)
