"""A run that was started twice, by peers that had not met, becomes one before the first rounds, or its peers warn."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping

import msgspec
import pytest
import torch
import trio

from p2ptrain.memory_network.network import MemoryDirectory
from p2ptrain.protocol.rounds.deciding.history import History, lineage_of
from p2ptrain.protocol.rounds.deciding.lineage import PastHeads
from p2ptrain.protocol.wire.messages import Attempt, Beat, Commit, Contributor, Entry, Head, Ready, SignedHead, Vote
from tests.protocol.signing import record_after
from tests.protocol.state_sync.test_provenance import checkpoint_of
from tests.protocol.swarm import RUN, Swarm, after, common, run_virtual, start_all, swarm

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


async def _start_anew(s: Swarm, founder: str, *others: str) -> None:
    """Kill the founder and start it again. It founds the run anew, as neither it nor the others reach anybody."""
    s.kill(founder)
    s.network.partition([founder], *([name] for name in others))
    s.start(founder, founder=True)
    await s.until(s.peers[founder].node.ready.is_set)


@pytest.mark.parametrize("same_weights", [False, True])
def test_founders_that_meet_before_their_first_rounds_train_together(same_weights: bool) -> None:
    """Where both began with the same weights, what was trained since is kept too."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400)) as s:
            s.same_weights = same_weights
            await _start_twice(s)
            await trio.sleep(5)
            for peer in s.peers.values():
                peer.paused = True
            await trio.sleep(1)
            before = {name: peer.flat() for name, peer in s.peers.items()}
            s.network.partition()
            await s.until(lambda: len(_geneses(s, "abcd")) == 1, within_s=20)
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
            await s.until(s.peers["b"].node.ready.is_set)
            genesis = _geneses(s, "z")
            if is_lost:
                s.kill("z")
            s.network.partition()
            await s.until(lambda: {"x", "y"} <= set(s.peers["b"].node.links.live))
            assert s.peers["b"].node.driver.head.round < 0
            await s.until(lambda: len(s.peers["b"].rounds()) >= 2)
            assert _geneses(s, "b") == genesis != _geneses(s, "x") == _geneses(s, "y")

    run_virtual(main)


def test_starts_that_follow_one_after_the_other_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until(lambda: bool(s.peers["a"].rounds()))
            for number, name in enumerate("bcd"):
                s.network.partition(["a", *"bcd"[:number]], [name])
                s.start(name, chosen=["bootstrap"])
                await s.until(s.peers[name].node.ready.is_set)
                assert _geneses(s, name) != _geneses(s, "a")
                s.network.partition()
                await s.until(lambda: len(_geneses(s, s.peers)) == 1)
                await trio.sleep(20)

    run_virtual(main)
    assert "another start" not in caplog.text


def test_one_stranger_wins_no_peer_of_a_larger_start() -> None:
    """A start that has a round already, against that of three peers that has none."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=300)) as s:
            s.network.partition(["d", "e", "f"], ["x"])
            for name in "def":
                s.start(name, chosen=["bootstrap"])
            s.start("x", founder=True, step_s=0.01)
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            genesis = _geneses(s, "def")
            await s.until(lambda: bool(s.peers["x"].rounds()))
            s.network.partition()
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "def"))
            assert _geneses(s, "def") == genesis != _geneses(s, "x")

    run_virtual(main)


def test_a_first_round_waits_for_the_state_of_another_start_that_is_being_downloaded() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=150)) as s:
            await _start_twice(s)
            s.network.bandwidth_bytes_s = 50e3
            s.network.partition()
            await s.until(lambda: common(s, 1, 1), within_s=400)
            await s.until(lambda: len(_geneses(s, "abcd")) == 1, within_s=5)

    run_virtual(main)


def test_a_state_of_another_start_that_comes_too_slowly_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one state is downloaded at a time: a slow donor would keep the peer from catching up in its own run."""
    monkeypatch.setattr("p2ptrain.protocol.state_sync.state_sync.FOLLOWING_PATIENCE_S", 1.0)

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=150)) as s:
            await _start_twice(s)
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
            await _start_twice(s)
            saved = checkpoint_of(s, "d")
            s.kill("d")
            s.kill("a")
            s.network.partition()
            d = s.start("d", restored=saved, chosen=["bootstrap"])
            await s.until(d.node.ready.is_set)
            assert len(_geneses(s, "bcd")) == 1

    run_virtual(main)


def test_a_founder_that_is_restarted_before_the_first_round_keeps_its_run() -> None:
    """It was given no initial peers. When it comes back, it meets a stranger that has committed rounds."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
            s.network.partition(["a", "b"], ["x"])
            start_all(s, "ab")
            s.start("x", founder=True, step_s=0.01)
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            await s.until(lambda: bool(s.peers["x"].rounds()))
            genesis, saved = _geneses(s, "a"), checkpoint_of(s, "a")
            s.kill("a")
            s.network.partition(["b"], ["a", "x"])
            await trio.sleep(1)
            a = s.start("a", restored=saved, remembered=["b"])
            await s.until(a.node.ready.is_set)
            s.network.partition()
            await s.until(lambda: {"a", "x"} <= set(s.peers["b"].node.links.live))
            await trio.sleep(20)
            assert _geneses(s, "a") == genesis != _geneses(s, "x")

    run_virtual(main)


@pytest.mark.parametrize(("founder", "member"), [("a", "b"), ("b", "a")])
def test_a_founder_that_starts_anew_before_the_first_round_and_its_member_become_one(founder: str, member: str) -> None:
    """Both starts are as large: the one with the smaller id goes on."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400)) as s:
            s.start(founder, founder=True)
            s.start(member, chosen=[founder])
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            await _start_anew(s, founder, member)
            smaller = {min(_geneses(s, "ab"))}
            s.network.partition()
            await s.until(lambda: _geneses(s, "ab") == smaller, within_s=20)
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
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            s.kill("a")
            await s.until(lambda: bool(s.peers["b"].rounds()), within_s=300)
            first = _geneses(s, "b")
            s.network.partition(["a"], ["b"])
            s.start("a", founder=True)
            await s.until(s.peers["a"].node.ready.is_set)
            assert _geneses(s, "a") != first
            s.network.partition()
            await s.until(lambda: _geneses(s, "ab") == first, within_s=20)
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
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            s.kill("a")
            await s.until(lambda: bool(s.peers["z"].rounds()), within_s=300)
            s.network.partition(["a", "b", "c"], ["z"])
            s.start("a", founder=True)
            for name in "bc":
                s.start(name, chosen=["bootstrap"])
            await s.until(lambda: all(s.peers[name].node.ready.is_set() for name in "abc"))
            second = _geneses(s, "abc")
            assert len(second) == 1
            s.network.partition()
            await s.until(lambda: all(s.peers[name].rounds("committed") for name in "abc"), within_s=120)
            assert _geneses(s, "abc") == second != _geneses(s, "z")

    run_virtual(main)


async def _lie(s: Swarm, name: str, how: str, last: int = 1000) -> Head:
    """A peer shows made-up rounds of the start whose genesis it has: all from the genesis on, or the last one only.

    Args:
        how: "rooted" (50 rounds) and "unrooted", in a lineage of its own, or "ours", in that of the others.
        last: the made-up round, if it is the only one.
    """
    driver = s.peers[name].node.driver
    own, prover, genesis = driver.context.liveness.own, driver.context.prover, driver.history.genesis
    assert genesis is not None
    s.peers[name].paused = False  # what it has received lands
    async with driver.paused():
        driver.context.state.anchor[:] = 7.0
        driver.context.state.rehash()
        hashes = driver.context.state.hashes
        founding = prover.founding(driver.head.genesis, -1, "0" * 64)
        lineage = driver.head.lineage if how == "ours" else lineage_of(founding)
        entries = [Entry(None, genesis), Entry(None, founding)] if how == "rooted" else []
        for round_ in range(50) if how == "rooted" else (last,):
            record = record_after(driver.head.genesis, lineage, round_, "")
            record = msgspec.structs.replace(record, contributors=(Contributor(*own, 1.0, bytes(32)),))
            ready = Ready(lineage, round_, Attempt(1, *own), own[1], record.sha256, b"")
            votes = (Vote(*own, prover.signed_ready(ready).signature),)
            entries.append(Entry(Commit(record, Attempt(1, *own), votes), None))
        head = msgspec.structs.replace(
            driver.head, lineage=lineage, round=round_, run_step=1000, tokens_total=10**9, state_hash=hashes.state,
            anchor_hash=hashes.anchor, voters=(own,), commit=None,
        )  # fmt: skip
        signed = SignedHead(head, (Vote(*own, prover.signature_of(head)),), genesis)
        driver.past_heads = PastHeads()
        driver.adopt(signed, History(genesis, entries))
    s.peers[name].paused = True
    # It does not come back to the others.
    s.peers[name].node.state_sync.on_beat = lambda link, beat: None  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize("how", ["rooted", "unrooted", "ours"])
@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
@pytest.mark.parametrize("seed", range(2))
def test_made_up_rounds_take_neither_a_restarted_founder_nor_its_members(
    initial_peer: str, seed: int, how: str
) -> None:
    """The members have rounds, and are linked with it soon after the stranger."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            s.start("a", founder=True)
            await s.until(s.peers["a"].node.ready.is_set)
            for name in "bcd":
                s.start(name, chosen=[initial_peer])
            s.start("x", chosen=["a"])
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            s.peers["x"].paused = True  # it never contributes
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abcd"), within_s=200)
            s.kill("a")
            lied = await _lie(s, "x", how)
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
            await _lie(s, "x", "ours", s.peers["a"].node.driver.head.round + lead)
            e = s.start("e", chosen=["bootstrap"])
            await s.until(e.node.ready.is_set, within_s=30)
            assert e.node.driver.head.state_hash == s.peers["a"].node.driver.head.state_hash

    run_virtual(main, seed)


def test_members_whose_run_goes_on_do_not_follow_a_founder_that_a_stranger_took() -> None:
    """It met the stranger alone."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until(s.peers["a"].node.ready.is_set)
            for name in "bcx":
                s.start(name, chosen=["a"])
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            s.peers["x"].paused = True
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abc"), within_s=200)
            s.kill("a")
            s.network.partition(["b", "c"], ["a", "x"])
            lied = await _lie(s, "x", "rooted")
            s.start("a", founder=True)
            await s.until(lambda: s.peers["a"].node.driver.head.lineage == lied.lineage, within_s=30)
            s.network.partition()
            await trio.sleep(60)
            assert all(s.peers[name].node.driver.head.round < lied.round for name in "bc")

    run_virtual(main)


async def _restart_beside_newcomers(s: Swarm, newcomers: str) -> set[str]:
    """b and c join what a started; a starts it anew three times, at last beside newcomers. Returns the first start."""
    s.start("a", founder=True)
    await s.until(s.peers["a"].node.ready.is_set)
    for name in "bc":
        s.start(name, chosen=["a"])
    await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
    first = _geneses(s, "a")
    for _ in range(2):
        s.kill("a")
        await trio.sleep(2)
        s.start("a", founder=True)
        await s.until(lambda: _geneses(s, "abc") == first, within_s=20)
    s.kill("a")
    s.network.partition(["b", "c"], ["a", *newcomers])
    s.start("a", founder=True)
    await s.until(s.peers["a"].node.ready.is_set)
    for name in newcomers:
        s.start(name, chosen=["a"])
    await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
    s.network.partition()
    return first


@pytest.mark.parametrize(("newcomers", "goes_back"), [("", {True}), ("d", {True, False}), ("de", {False})])
def test_a_founder_that_starts_anew_goes_back_to_its_members_unless_newcomers_are_more(
    newcomers: str, goes_back: set[bool]
) -> None:
    """Of two starts that are as large the one with the smaller id goes on."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=500)) as s:
            first = await _restart_beside_newcomers(s, newcomers)
            await s.until(lambda: len(_geneses(s, s.peers)) == 1, within_s=40)
            assert (_geneses(s, "a") == first) in goes_back

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
            await s.until(lambda: len(_geneses(s, s.peers)) == 1, within_s=40)

    run_virtual(main)


@pytest.mark.parametrize(("founder", "member"), [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("sync_every", [400, 900])
def test_no_stranger_keeps_a_founder_and_its_member_apart(sync_every: int, founder: str, member: str) -> None:
    """It shows a lineage of its own in the member's start."""

    async def main() -> None:
        names = {founder, member}
        async with swarm(dataclasses.replace(PLAIN, sync_every=sync_every)) as s:
            s.start(founder, founder=True)
            await s.until(s.peers[founder].node.ready.is_set)
            s.start(member, chosen=[founder])
            x = s.start("x", chosen=[founder])
            made_up, make_beat = f"1-{'f' * 16}", x.node.make_beat

            def lie(sent_s: float, echo_s: float, held_s: float) -> Beat:
                beat = make_beat(sent_s, echo_s, held_s)
                return msgspec.structs.replace(beat, lineage=made_up if beat.lineage else "")

            x.node.make_beat = lie  # type: ignore[method-assign]
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            x.paused = True
            await _start_anew(s, founder)
            s.network.partition()
            await s.until(lambda: len(_geneses(s, names)) == 1, within_s=30)
            for name in names:
                beat = s.peers[name].node.links.live["x"].beat
                assert beat is not None
                assert beat.lineage == made_up

    run_virtual(main)


def test_nobody_goes_for_ever_with_a_founder_that_starts_the_run_again_and_again() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=300)) as s:
            start_all(s, "abc")
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
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
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            s.network.partition(["a", "b"], ["c"])
            await s.until(lambda: bool(s.peers["b"].rounds("committed")))
            first = _geneses(s, "b")
            await _start_anew(s, "a", "b", "c")
            s.network.partition()
            await s.until(lambda: _geneses(s, "abc") == first, within_s=60)

    run_virtual(main)


def test_a_member_that_continues_the_run_from_its_checkpoint_does_not_follow_the_founder() -> None:
    """Its user started the run again, as the founder's did."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
            s.start("a", founder=True)
            s.start("b")
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            await trio.sleep(20)
            first, saved = _geneses(s, "a"), checkpoint_of(s, "b")
            for name in "ab":
                s.kill(name)
            s.network.partition(["a"], ["b"])
            s.start("b", restored=saved, founder=True)
            s.start("a", founder=True)
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()), within_s=60)
            assert _geneses(s, "a") != first == _geneses(s, "b")
            s.network.partition()
            await trio.sleep(30)
            assert _geneses(s, "b") == first

    run_virtual(main)


def test_who_named_a_founder_goes_with_it_to_the_larger_start() -> None:
    """Whatever the ids of the two starts."""

    def end(names: str) -> None:
        founder, member, *others = names

        async def main() -> None:
            async with swarm(dataclasses.replace(PLAIN, sync_every=1000)) as s:
                s.network.partition([founder, member], others)
                s.start(founder, chosen=["bootstrap"])
                await s.until(s.peers[founder].node.ready.is_set)
                s.start(member, chosen=[founder])
                for name in others:
                    s.start(name, chosen=["bootstrap"])
                await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
                larger = _geneses(s, others)
                assert len(larger) == 1
                s.network.partition()
                await s.until(lambda: _geneses(s, names) == larger, within_s=60)

        run_virtual(main)

    end("abcde")
    end("edcba")


def test_a_pairwise_run_before_its_last_round_is_no_fresh_one() -> None:
    """It has no round until its end; two of its peers do not leave their work for a larger start of three."""

    async def main() -> None:
        run = dataclasses.replace(RUN, averaging="pairwise", outer_optimizer="sgdm", total_steps=100_000)
        async with swarm(run) as s:
            s.network.partition(["a", "b"], ["x", "y", "z"])
            for name in "abxyz":
                s.start(name, chosen=["bootstrap"])
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()))
            before = _geneses(s, "ab")
            await trio.sleep(30)
            s.network.partition()
            await s.until(lambda: set("xyz") <= set(s.peers["a"].node.links.live))
            await trio.sleep(30)
            assert _geneses(s, "ab") == before != _geneses(s, "xyz")

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
            await s.until(s.peers["x"].node.ready.is_set)
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
            genesis = _geneses(s, "b")
            a = s.start("a", restored=saved, remembered=["b"])
            await s.until(a.node.ready.is_set, within_s=10)
            assert _geneses(s, "a") == genesis
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
            await s.until(lambda: all(p.node.ready.is_set() for p in s.peers.values()), within_s=20)
            founded = [e for p in s.peers.values() for e in p.events if e["event"] == "adopt" and e["founded"]]
            assert len(founded) == 1

    run_virtual(main)
