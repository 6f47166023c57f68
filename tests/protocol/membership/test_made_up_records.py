"""Strangers announce members that do not exist, whose addresses keep every dial waiting. A joiner still gets in."""

from __future__ import annotations

import random

import pytest
import trio

from p2ptrain.errors import TransientError, UnreachableError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import bucket_of, encode_record, member_key
from p2ptrain.protocol.membership.lookup import MAX_LOOK_S, ask_settings
from p2ptrain.protocol.membership.membership import MAX_KNOWN, MAX_KNOWN_JOINING, Membership
from p2ptrain.protocol.membership.neighbours import DIALLED_AT_ONCE
from p2ptrain.protocol.state_sync.joining import ADOPT_TIMEOUT_S
from p2ptrain.settings.config import RunConfig
from tests.protocol.membership.test_membership import Member
from tests.protocol.swarm import RUN, Shapes, Swarm, run_virtual, swarm
from tests.protocol.wiring import hello_of

SMALL: Shapes = [("weight", (70, 64))]
# As long as a dial to an address that drops packets.
HANGS_S = 10.0


async def make_up(network: MemoryNetwork, count: int) -> None:
    """Announce peers that do not exist; their ids sort before all others."""
    network.latency = lambda a, b: HANGS_S if b.startswith("!") else 0.01  # type: ignore[method-assign]
    for number in range(count):
        peer_id = f"!{number}"
        record = encode_record([f"/ip4/5.188.7.1/tcp/{number}/p2p/{peer_id}"], "trainer")
        await network.directory(peer_id).announce(member_key("test", bucket_of(peer_id)), record, 3600.0)


async def members(s: Swarm) -> None:
    for name in ("m1", "m2", "m3", "m4"):
        s.start(name, founder=name == "m1")
    await trio.sleep(10)


async def joined_after_s(s: Swarm, *chosen: str) -> float:
    """When a joiner has the run's state, in seconds; it must not have founded a run."""
    start = trio.current_time()
    joiner = s.start("joiner", chosen=chosen)
    await s.until(lambda: joiner.node.ready.is_set() or joiner.error is not None, within_s=ADOPT_TIMEOUT_S)
    s.check()
    assert not joiner.node.state_sync.joining.founded
    assert joiner.node.driver.head.genesis == s.peers["m1"].node.driver.head.genesis
    return trio.current_time() - start


async def settings_of(network: MemoryNetwork, *chosen: str) -> RunConfig | None:
    transport, directory = network.transport("observer"), network.directory("observer")
    return await ask_settings(
        transport, directory, "test", timeout_s=5.0, rng=random.Random(0), chosen=frozenset(chosen)
    )  # fmt: skip


def test_a_bootstrap_node_that_answers_no_hello_delays_no_peer() -> None:
    """It takes streams, but is no member: neither a run's founder nor who joins by it waits for its Hello."""

    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            s.network.transport("bootstrap")
            start = trio.current_time()
            assert await settings_of(s.network, "bootstrap") is None
            founder = s.start("m1", chosen=("bootstrap",))
            await s.until(lambda: founder.node.ready.is_set())
            assert founder.node.state_sync.joining.founded
            assert trio.current_time() - start < 6
            start = trio.current_time()
            assert await settings_of(s.network, "bootstrap") == RUN
            assert await joined_after_s(s, "bootstrap") < 3
            assert trio.current_time() - start < 4

    run_virtual(main)


@pytest.mark.parametrize("count", [250, 2000])
def test_with_a_member_as_initial_peer_a_joiner_is_in_within_seconds(count: int) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await members(s)
            await make_up(s.network, count)
            start = trio.current_time()
            assert await settings_of(s.network, "m2") == RUN
            assert trio.current_time() - start < 2
            assert await joined_after_s(s, "m2") < 5
            assert len(s.peers["joiner"].node.membership.known) <= MAX_KNOWN  # having joined, it remembers few

    run_virtual(main)


def test_the_initial_peer_needs_no_record() -> None:
    """Made-up ones may have pushed it out of the DHT."""

    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await members(s)
            await make_up(s.network, 250)
            records = s.network._records
            assert records is not None
            for of_key in records.values():
                of_key.pop("m2", None)
            assert await settings_of(s.network, "m2") == RUN
            assert await joined_after_s(s, "m2") < 5

    run_virtual(main)


def test_with_a_bootstrap_node_alone_one_of_the_members_is_found_among_250() -> None:
    """250 records take 16 dials of 3 s; with four members among them, the first of theirs comes at a fifth of it."""

    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await members(s)
            await make_up(s.network, 250)
            start = trio.current_time()
            assert await settings_of(s.network) == RUN
            assert trio.current_time() - start < 50
            assert await joined_after_s(s) < 50

    run_virtual(main)


def test_no_more_than_16_are_dialled_at_once_and_in_random_order() -> None:
    dialled: list[str] = []

    async def main() -> None:
        network = MemoryNetwork()
        await make_up(network, 250)
        dialling = most = 0
        transport = network.transport("joiner")
        open_stream = transport.open_stream

        async def watched(peer_id: str, maddrs: list[str]) -> object:
            nonlocal dialling, most
            dialled.append(peer_id)
            dialling += 1
            most = max(most, dialling)
            try:
                return await open_stream(peer_id, maddrs)
            finally:
                dialling -= 1

        transport.open_stream = watched  # type: ignore[method-assign, assignment]
        with trio.move_on_after(40):
            await ask_settings(
                transport, network.directory("joiner"), "test", timeout_s=5.0, rng=random.Random(3),
                chosen=["!200"],
            )  # fmt: skip
        assert most == DIALLED_AT_ONCE

    run_virtual(main)
    assert "!200" in dialled[:DIALLED_AT_ONCE]  # trio starts tasks of one moment in any order
    assert dialled[:40] != sorted(dialled[:40])
    assert len(set(dialled)) > 150


def test_no_run_is_founded_before_all_announced_peers_were_tried() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await make_up(s.network, 100)
            joiner = s.start("joiner")
            await trio.sleep(100 / DIALLED_AT_ONCE * HANGS_S - 1)
            assert not joiner.node.ready.is_set()
            await s.until(lambda: joiner.node.ready.is_set(), within_s=ADOPT_TIMEOUT_S)
            assert joiner.node.state_sync.joining.founded

    run_virtual(main)


@pytest.mark.long
def test_of_too_many_to_try_the_joiner_says_so_and_founds_no_run() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL) as s:
            await make_up(s.network, 500)
            joiner = s.start("joiner", restarts=True)
            runner = joiner.runner
            assert runner is not None
            await s.until(lambda: runner.failure is not None)
            assert isinstance(runner.failure, TransientError)
            assert "more peers are announced than could be tried within 120 s" in str(runner.failure)
            assert not runner.node.state_sync.joining.founded

    run_virtual(main)


def test_a_joiner_remembers_a_bounded_number_and_knows_that_there_were_more() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        links = Links(network.transport("joiner"), lambda: hello_of("joiner"), Member("joiner"))
        membership = Membership(links, network.directory("joiner"), "test", "joiner", tuple, random.Random(0))
        for number in range(MAX_KNOWN_JOINING + 1):
            membership.hint(f"!{number}", ())
        assert len(membership.known) == MAX_KNOWN_JOINING
        for member in membership.known.values():
            member.dials = 1
        assert membership.undecided
        membership.settle()
        assert len(membership.known) == MAX_KNOWN

    run_virtual(main)


def test_a_run_is_not_declared_absent_while_announced_peers_were_not_asked() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await make_up(network, 700)
        start = trio.current_time()
        with pytest.raises(UnreachableError, match="700 peers are announced, none of them answers"):
            await settings_of(network)
        assert MAX_LOOK_S <= trio.current_time() - start < MAX_LOOK_S + 1

    run_virtual(main)
