"""A stranger that shows the members' round, and a state of its own, wins no joiner and no member."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.memory_network.network import MemoryDirectory
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.neighbours import RELINKED_WITHIN_S
from p2ptrain.protocol.rounds.deciding.history import History, lineage_of
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.provenance import Pins, Silences
from p2ptrain.protocol.state_sync.transfer import StateServer
from p2ptrain.protocol.wire.messages import Beat, Entry, Request, SignedHead, Vote
from tests.protocol.state_sync.starts import PLAIN, keep_dialling, lie, lying, made_up_round, stay_away
from tests.protocol.state_sync.test_provenance import checkpoint_of
from tests.protocol.swarm import Swarm, run_virtual, start_all, swarm

AHEAD = 100_000


async def start_with_stranger(s: Swarm, members: str) -> None:
    """Members with rounds, and the stranger x, which has the run's genesis."""
    start_all(s, members + "x")
    s.peers["x"].paused = True
    await s.until(lambda: all(len(s.peers[name].rounds()) >= 2 for name in members), within_s=200)


def mirror(s: Swarm) -> None:
    """The stranger's heartbeats show the round of a member."""
    node = s.peers["x"].node
    make_beat = node.make_beat

    def beat(sent_s: float, echo_s: float, held_s: float) -> Beat:
        head = s.peers["a"].node.driver.head
        own = make_beat(sent_s, echo_s, held_s)
        return msgspec.structs.replace(own, genesis=head.genesis, lineage=head.lineage, round=head.round)

    node.make_beat = beat  # type: ignore[method-assign]


async def fork(s: Swarm, saved: Restored) -> str:
    """The stranger shows the real history up to a checkpoint, and a lineage that it founds with another state after it.

    Returns that lineage.
    """
    head = saved.head
    assert saved.history.genesis is not None
    async with lying(s, "x") as driver:
        own, prover = driver.context.liveness.own, driver.context.prover
        hashes = driver.context.state.hashes
        founding = prover.founding(head.lineage, head.round, hashes.state)
        forged = msgspec.structs.replace(
            head, lineage=lineage_of(founding), state_hash=hashes.state, anchor_hash=hashes.anchor, voters=(own,),
            commit=None,
        )  # fmt: skip
        signed = SignedHead(forged, (Vote(*own, prover.signature_of(forged)),), saved.history.genesis)
        driver.adopt(signed, History(saved.history.genesis, [*saved.history.entries, Entry(None, founding)]))
    return forged.lineage


@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
@pytest.mark.parametrize("seed", range(2))
def test_a_joiner_waits_for_members_that_cannot_answer_now(initial_peer: str, seed: int) -> None:
    """In an outer step of a second or two, while the stranger answers."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            await start_with_stranger(s, "abcd")
            await lie(s, "x", "theirs", AHEAD)
            mirror(s)
            s.worker.work_s = 0.3
            await s.until(lambda: any(s.peers[name].node.driver.committer.stepping for name in "abcd"))
            e = s.start("e", chosen=[initial_peer])
            await s.until_joined("e", within_s=200)
            assert e.node.driver.head.round < AHEAD

    run_virtual(main, seed)


@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
@pytest.mark.parametrize("seed", range(6))
def test_a_head_with_the_members_state_and_a_voter_of_its_own_is_another_one(initial_peer: str, seed: int) -> None:
    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            if initial_peer == "a":  # farther away than the others
                s.network.latency = lambda a, b: 0.05 if {a, b} == {"a", "e"} else 0.001  # type: ignore[method-assign]
            await start_with_stranger(s, "abc")
            driver = s.peers["x"].node.driver
            own, prover, genesis = driver.context.liveness.own, driver.context.prover, driver.signed_head

            class Lying(RoundDriver):
                @property
                def signed_head(self) -> SignedHead:
                    assert genesis is not None
                    head = s.peers["a"].node.driver.head
                    head = msgspec.structs.replace(head, round=head.round + AHEAD, voters=(own,), commit=None)
                    entry = made_up_round(driver, head.lineage, head.round)
                    self.history.page = lambda before, count: [] if before else [entry]  # type: ignore[method-assign]
                    return SignedHead(head, (Vote(*own, prover.signature_of(head)),), genesis.genesis)

            driver.__class__ = Lying
            stay_away(s, "x")
            mirror(s)
            await trio.sleep(3 + seed)
            e = s.start("e", chosen=[initial_peer])
            await s.until_joined("e", within_s=60)
            assert e.node.driver.head.round < AHEAD

    run_virtual(main, seed)


@pytest.mark.parametrize("round_", ["the member's", "a later one", "a later one of another lineage"])
def test_of_one_member_and_one_stranger_a_joiner_believes_neither_and_says_so(round_: str) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            await start_with_stranger(s, "a")
            await lie(s, "x", "rooted" if "lineage" in round_ else "theirs", AHEAD)
            if round_ == "the member's":
                mirror(s)
            await trio.sleep(2)
            e = s.start("e", chosen=["bootstrap"])
            with trio.move_on_after(180):
                while e.error is None:
                    await trio.sleep(0.5)
            assert not e.node.ready.is_set()
            assert "name a member in --initial-peers" in "".join(traceback.format_exception(e.error))
            e.error = None

    run_virtual(main)


@pytest.mark.parametrize("seed", range(2))
def test_members_at_different_rounds_agree_against_a_stranger_at_a_later_one(seed: int) -> None:
    """One of the two is always behind, as its link is slow: its head is in the history of the other."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=10), seed=seed) as s:
            await start_with_stranger(s, "ab")
            await lie(s, "x", "theirs", AHEAD)
            s.network.latency = lambda a, b: 0.3  # type: ignore[method-assign]
            for number in range(4):
                await trio.sleep(1.3 + 0.37 * number)
                joiner = s.start(f"e{number}", chosen=["bootstrap"])
                await s.until_joined(joiner.peer_id, within_s=100)
                assert joiner.node.driver.head.round < AHEAD
                s.kill(joiner.peer_id)

    run_virtual(main, seed)


def test_a_stranger_that_dials_before_the_directory_answers_wins_no_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = MemoryDirectory.lookup

    async def slow(directory: MemoryDirectory, key: str) -> Mapping[str, bytes]:
        if directory._peer_id == "e":
            await trio.sleep(6)
        return await lookup(directory, key)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            await start_with_stranger(s, "abcd")
            await lie(s, "x", "theirs", AHEAD)
            for name in "abcd":  # they dial nobody
                monkeypatch.setattr(s.peers[name].node.membership, "hint", lambda *args, **kwargs: None)
            monkeypatch.setattr(MemoryDirectory, "lookup", slow)
            e = s.start("e", chosen=["bootstrap"])
            while not e.node.links.live:
                s.peers["x"].node.membership.hint("e", ("/mem/e",))
                await trio.sleep(0.2)
            await s.until_joined("e", within_s=100)
            assert e.node.driver.head.round < AHEAD

    run_virtual(main)


@pytest.mark.parametrize("gap_s", [0, 1, 8])
def test_a_stranger_takes_no_swarm_whose_members_are_all_restarted(gap_s: float) -> None:
    """One after the other, from their checkpoints. The lineage that it founded does not begin with their state."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            await start_with_stranger(s, "abc")
            saved = {name: checkpoint_of(s, name) for name in "abc"}
            for name in "abc":
                s.kill(name)
            lineage = await fork(s, max(saved.values(), key=lambda restored: restored.head.round))
            await trio.sleep(20)
            for name in "abc":
                s.start(name, restored=saved[name], chosen=["bootstrap"])
                await trio.sleep(gap_s)
            await s.until_joined("a", "b", "c", within_s=200)
            await trio.sleep(30)
            adopted = {
                event["lineage"] for name in "abc" for event in s.peers[name].events if event["event"] == "adopt"
            }
            assert lineage not in adopted

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("answers_after_s", [0.0, 20.0])
def test_a_joiner_that_knows_the_founder_counts_no_peer_of_another_run(
    answers_after_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_honestly = StateServer.serve

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            s.network.partition(["a"], ["x"])
            s.start("x", chosen=["bootstrap"])
            await s.until(lambda: all(s.peers[name].rounds() for name in "ax"))
            stay_away(s, "x")
            s.network.partition()
            answers_s, slow = trio.current_time() + answers_after_s, s.peers["a"].node.driver

            async def serve(server: StateServer, link: Link, request: Request) -> None:
                if server._driver is slow and trio.current_time() < answers_s:
                    return await trio.sleep_until(answers_s)
                await serve_honestly(server, link, request)

            monkeypatch.setattr(StateServer, "serve", serve)
            e = s.start("e", chosen=["bootstrap"])
            e.node.state_sync.joining._pins = Pins(founder="a")
            await s.until_joined("e", within_s=30 + 2 * answers_after_s)
            assert e.node.driver.head.genesis == s.peers["a"].node.driver.head.genesis

    run_virtual(main, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
def test_a_stranger_that_answers_nothing_is_left_out_after_a_minute(
    initial_peer: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds come every 5 s, so chunks or heads that it was asked for would always come too late."""
    serve_honestly = StateServer.serve

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=50), seed=seed) as s:
            await start_with_stranger(s, "a")
            mirror(s)
            silent = s.peers["x"].node.driver

            async def serve(server: StateServer, link: Link, request: Request) -> None:
                if server._driver is silent:
                    await trio.sleep_forever()
                await serve_honestly(server, link, request)

            monkeypatch.setattr(StateServer, "serve", serve)
            s.network.bandwidth_bytes_s = 400e3
            await trio.sleep(2 + seed)
            s.start("e", chosen=[initial_peer])
            await s.until_joined("e", within_s=100)

    run_virtual(main, seed)


def test_a_silence_goes_on_though_a_request_is_cancelled() -> None:
    async def main() -> None:
        silences = Silences()
        donor: Any = "a"
        for _ in range(8):
            with trio.move_on_after(4), silences.noting(donor, "head"):
                await trio.sleep_forever()
            with contextlib.suppress(PeerLostError), silences.noting(donor, "head"):
                await trio.sleep(4)
                raise PeerLostError("no answer")
        assert silences.is_long(donor)
        with contextlib.suppress(WireError), silences.noting(donor, "head"):
            raise WireError("an answer, and a wrong one")
        assert not silences.is_long(donor)

    run_virtual(main)


@pytest.mark.parametrize(("initial_peer", "within_s"), [("bootstrap", 200), ("a", 15)])
@pytest.mark.parametrize("seed", range(3))
def test_a_peer_with_a_checkpoint_continues_though_all_others_are_silent(
    initial_peer: str, within_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are so many that the first is asked again before the last is given up. Initial peers are asked first."""
    serve_honestly = StateServer.serve

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            await start_with_stranger(s, "aduvwyz")
            saved = checkpoint_of(s, "d")
            answer = {s.peers[name].node.driver.context.peer_id for name in {"d", initial_peer} & s.peers.keys()}
            s.kill("d")

            async def serve(server: StateServer, link: Link, request: Request) -> None:
                if server._driver.context.peer_id not in answer:
                    await trio.sleep_forever()
                await serve_honestly(server, link, request)

            monkeypatch.setattr(StateServer, "serve", serve)
            # An initial peer is the last that it links.
            s.network.latency = lambda a, b: 0.5 if {a, b} == {"a", "d"} else 0.05  # type: ignore[method-assign]
            s.start("d", chosen=[initial_peer], restored=saved)
            await s.until_joined("d", within_s=within_s)

    run_virtual(main, seed)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_peer_hears_the_members_before_it_takes_the_state_of_the_nearest(is_restarted: bool, seed: int) -> None:
    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            await start_with_stranger(s, "abcd")
            await lie(s, "x", "theirs", AHEAD)
            s.network.latency = lambda a, b: 0.005 if "x" in (a, b) else 0.15  # type: ignore[method-assign]
            saved = checkpoint_of(s, "d")
            if is_restarted:
                s.kill("d")
            await trio.sleep(3 + seed)
            name = "d" if is_restarted else "e"
            peer = s.start(name, chosen=["bootstrap"], restored=saved if is_restarted else None)
            await s.until_joined(name, within_s=100)
            assert peer.node.driver.head.round < AHEAD

    run_virtual(main, seed)


@pytest.mark.parametrize("members", ["ad", "abcd"])
@pytest.mark.parametrize("seed", range(2))
def test_a_restarted_member_leaves_its_voters_for_no_lineage_of_a_stranger(members: str, seed: int) -> None:
    """It has the run's history up to the member's checkpoint, and has founded a lineage after it."""

    async def main() -> None:
        async with swarm(PLAIN, seed=seed) as s:
            await start_with_stranger(s, members)
            saved = checkpoint_of(s, "d")
            lineage = await fork(s, saved)
            s.kill("d")
            s.network.latency = lambda a, b: 0.005 if "x" in (a, b) else 0.1  # type: ignore[method-assign]
            await trio.sleep(1)
            d = s.start("d", chosen=["bootstrap"], restored=saved)
            await s.until_joined("d", within_s=200)
            assert d.node.driver.head.lineage != lineage

    run_virtual(main, seed)


@pytest.mark.parametrize("is_before_the_first_round", [True, False])
def test_a_member_without_initial_peers_follows_no_single_stranger(is_before_the_first_round: bool) -> None:
    """Its own voters cannot contradict: it is one of the founder's first, or its partner is away for 40 s."""

    async def main() -> None:
        run = dataclasses.replace(PLAIN, sync_every=300 if is_before_the_first_round else 100)
        async with swarm(run) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            s.start("b", remembered=["a"])
            s.start("x", chosen=["a"])
            await s.until_joined()
            s.peers["x"].paused = True
            if not is_before_the_first_round:
                await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "ab"), within_s=200)
            await lie(s, "x", "unrooted", AHEAD)
            if not is_before_the_first_round:
                await trio.sleep(60)
                s.network.partition(["a"], ["b", "x"])
                await trio.sleep(40)
                s.network.partition()
            await trio.sleep(100)
            assert s.peers["b"].node.driver.head.round < AHEAD

    run_virtual(main)


@pytest.mark.parametrize("swarm_size", [0.0, 200.0])
def test_links_prove_nothing_in_a_large_swarm(swarm_size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            s.start("a", founder=True)
            await s.until_joined("a")
            node = s.start("b", remembered=["a"]).node
            await s.until_joined("b")
            await trio.sleep(RELINKED_WITHIN_S + 1)
            starts = node.state_sync._starts
            monkeypatch.setattr(starts, "_links_in", lambda other: (1, 5))
            monkeypatch.setattr(node.driver.context, "swarm_size", lambda: swarm_size)
            head = s.peers["a"].node.driver.head
            assert starts.is_trusted(node.links.get("a"), head, -math.inf) is (swarm_size == 0)

    run_virtual(main)


@pytest.mark.parametrize("initial_peer", ["a", "bootstrap"])
@pytest.mark.parametrize(("down_s", "lost"), [(12, "abcdx"), (80, "abcdx"), (40, "abcd")])
@pytest.mark.parametrize("seed", range(2))
def test_a_joiner_whose_line_was_down_awaits_those_that_it_asked(
    down_s: float, lost: str, initial_peer: str, seed: int
) -> None:
    """The stranger is back before the members, or was not lost."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=400), seed=seed) as s, trio.open_nursery() as nursery:
            await start_with_stranger(s, "abcd")
            await lie(s, "x", "theirs", AHEAD)
            mirror(s)
            s.network.bandwidth_bytes_s = 60e3
            await trio.sleep(2 + seed)
            e = s.start("e", chosen=[initial_peer])
            await s.until(
                lambda: e.node.state_sync.joining.status not in ("joining", "downloading state 0 %"), within_s=60
            )
            s.network.partition(["e"], list(lost))
            await trio.sleep(down_s)
            s.network.partition()
            nursery.start_soon(keep_dialling, s, "x", "e")
            await s.until_joined("e", within_s=90)  # lost peers are dialled every minute in the end
            assert e.node.driver.head.round < AHEAD
            nursery.cancel_scope.cancel()

    run_virtual(main, seed)


@pytest.mark.parametrize("members", ["a", "ab", "abcd"])
def test_members_whose_heads_come_late_still_count(members: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers take longer than a joiner waits for each, for half a minute; a stranger answers at once."""
    serve_honestly = StateServer.serve

    async def main() -> None:
        async with swarm(PLAIN) as s:
            await start_with_stranger(s, members)
            await lie(s, "x", "theirs", AHEAD)
            mirror(s)
            liar, late_until_s = s.peers["x"].node.driver, trio.current_time() + 32

            async def serve(server: StateServer, link: Link, request: Request) -> None:
                if server._driver is not liar and request.what == "head" and trio.current_time() < late_until_s:
                    await trio.sleep(16)
                await serve_honestly(server, link, request)

            monkeypatch.setattr(StateServer, "serve", serve)
            await trio.sleep(2)
            e = s.start("e", chosen=["bootstrap"])
            with trio.move_on_after(100):
                await e.node.ready.wait()
            assert e.node.driver.head.round < AHEAD
            # One member and one stranger never agree: that ends with an error.
            assert e.node.ready.is_set() == (len(members) > 1)
            e.error = None

    run_virtual(main)
