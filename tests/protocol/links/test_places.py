"""Strangers under many names hold all places of a peer. A newcomer still gets in: the oldest give way."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links import limits
from p2ptrain.protocol.links.handshake import OBSERVER, TRAINER
from p2ptrain.protocol.links.limits import (
    MAX_GREETING,
    MAX_GREETING_OF_ONE,
    MAX_LINKS,
    MAX_OBSERVERS,
    excess_observers,
    greeting_to_end,
)
from p2ptrain.protocol.membership.lookup import ask_settings
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Beat, Hello
from tests.protocol.swarm import RUN, Shapes, Swarm, run_virtual, swarm
from tests.protocol.wiring import endpoints, hello_of

SMALL: Shapes = [("weight", (70, 64))]
NAMES = ("m1", "m2", "m3")
LATENCY_S = 0.05
# Until a newcomer has the run's settings and its state, and a link to every member. Without attackers: 1.25 s.
WITHIN_S = 5.0

# --- the rules ---------------------------------------------------------------------------------------------------


def full(*held: str) -> list[str]:
    """Greetings that fill all places: first these, and then those of others, one of each."""
    return [*held, *(f"other {number}" for number in range(MAX_GREETING - len(held)))]


def test_a_greeting_ends_only_for_want_of_a_place() -> None:
    assert greeting_to_end([], "new") is None
    assert greeting_to_end(full()[1:], "new") is None
    assert greeting_to_end(full(), "new") == 0


def test_a_peer_with_all_that_one_may_have_loses_its_own_oldest_greeting() -> None:
    assert greeting_to_end(["a", "new"], "new") is None
    assert greeting_to_end(["a", *MAX_GREETING_OF_ONE * ["new"]], "new") == 1
    assert greeting_to_end(full("a", *MAX_GREETING_OF_ONE * ["new"]), "new") == 1


def test_the_oldest_greeting_of_those_with_most_gives_way() -> None:
    assert greeting_to_end(full("a", "b", "c", "b", "c"), "new") == 1


@pytest.mark.parametrize(
    ("role", "members", "observers", "ended"),
    [
        (TRAINER, 10, MAX_OBSERVERS, 0),
        (TRAINER, MAX_LINKS - 1, 0, 0),
        (TRAINER, MAX_LINKS - MAX_OBSERVERS, MAX_OBSERVERS, 1),
        (TRAINER, MAX_LINKS - 1, 1, 1),
        (TRAINER, MAX_LINKS, 0, None),
        (OBSERVER, 10, MAX_OBSERVERS - 1, 0),
        (OBSERVER, 10, MAX_OBSERVERS, 1),
        (OBSERVER, 10, MAX_OBSERVERS + 3, 4),  # several were accepted at once
        (OBSERVER, MAX_LINKS - 1, 0, 0),
        (OBSERVER, MAX_LINKS - 1, 1, 1),
        (OBSERVER, MAX_LINKS, 0, None),
    ],
)
def test_observers_give_way_to_members_and_to_newer_observers(
    role: str, members: int, observers: int, ended: int | None
) -> None:
    assert excess_observers(role, members, observers) == ended


# --- attacks -----------------------------------------------------------------------------------------------------


async def stay(network: MemoryNetwork, peer_id: str, victim: str, role: str) -> None:
    """Hold a stream to a victim, in silence or as an observer with heartbeats; open another a second after its end."""
    hello = encode_frame(Hello("test", "", f"{peer_id}.1", role, (), b"")) if role else b""
    beat = encode_frame(Beat(0.0, 0.0, 0.0, "", "", -1, 0, 0, "", 0.0, (), 0)) if role else b""
    while True:
        with contextlib.suppress(PeerLostError):
            stream = await network.transports[peer_id].open_stream(victim, [])
            await stream.send_all(hello)
            while True:
                await stream.send_all(beat)
                await trio.sleep(1)
        await trio.sleep(1)


async def join(s: Swarm) -> None:
    """A newcomer asks for the settings and joins, as `p2ptrain join` does, and is a member within WITHIN_S."""
    transport, directory = s.network.transport("new"), s.network.directory("new")
    with trio.fail_after(WITHIN_S):
        assert await ask_settings(transport, directory, "test", timeout_s=5.0, rng=random.Random(0)) == RUN
        newcomer = s.start("new")
        await newcomer.node.ready.wait()
        while not all("new" in s.peers[name].node.alive for name in NAMES):
            await trio.sleep(0.05)
    assert not newcomer.node.state_sync.joining.founded
    assert newcomer.node.driver.head.genesis == s.peers["m1"].node.driver.head.genesis


async def members(s: Swarm) -> None:
    for name in NAMES:
        s.start(name, founder=name == "m1")
    await s.until(lambda: all(len(s.peers[name].node.alive) == len(NAMES) - 1 for name in NAMES))


def attack(s: Swarm, nursery: trio.Nursery, *, names: int, streams: int, role: str = "") -> None:
    """So many identities, each with so many streams to every member."""
    for number in range(names):
        s.network.transport(f"x{number}")
        for victim in NAMES * streams:
            nursery.start_soon(stay, s.network, f"x{number}", victim, role)


def test_members_that_say_hello_at_one_instant_take_no_more_links_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_LINKS", 2)

    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a") as (a,):
            streams = [await network.transport(f"x{number}").open_stream("a", []) for number in range(5)]
            async with trio.open_nursery() as nursery:
                for number, stream in enumerate(streams):
                    nursery.start_soon(stream.send_all, encode_frame(hello_of(f"x{number}")))
            await trio.sleep(1)
            assert len(a.linked) == len(a.links.live) == 2

    run_virtual(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [MAX_GREETING // MAX_GREETING_OF_ONE, pytest.param(MAX_GREETING, marks=pytest.mark.long)]
)
def test_a_newcomer_gets_in_while_silent_identities_hold_all_greetings(names: int) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL, latency_s=LATENCY_S) as s, trio.open_nursery() as nursery:
            await members(s)
            attack(s, nursery, names=names, streams=MAX_GREETING_OF_ONE)
            await trio.sleep(20)  # longer than a greeting may last
            await s.until(lambda: all(len(s.peers[name].node.links._greeting) == MAX_GREETING for name in NAMES))
            await join(s)
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.slow
@pytest.mark.parametrize("names", [MAX_OBSERVERS, pytest.param(2 * MAX_OBSERVERS, marks=pytest.mark.long)])
def test_a_newcomer_gets_in_while_observers_hold_all_their_places(names: int) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=SMALL, latency_s=LATENCY_S) as s, trio.open_nursery() as nursery:
            await members(s)
            attack(s, nursery, names=names, streams=1, role=OBSERVER)
            await trio.sleep(20)
            for name in NAMES:
                live = s.peers[name].node.links.live.values()
                assert sum(link.hello.role == OBSERVER for link in live) == MAX_OBSERVERS
            await join(s)
            nursery.cancel_scope.cancel()

    run_virtual(main)
