"""Which peers can dial which, and rounds if some cannot."""

from __future__ import annotations

import math
import random

import pytest
import trio

from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.membership.neighbours import PRIVATE_DIALS, PRIVATE_RETRY_S
from p2ptrain.protocol.membership.reachability import Scope, scope_of, worth_dialling
from tests.protocol.swarm import run_virtual, swarm
from tests.protocol.wiring import Endpoint, hello_of

PUBLIC, OTHER_PUBLIC = "/ip4/5.188.7.1/tcp/4001/p2p/QmA", "/ip6/2a00:1450::1/tcp/4001/p2p/QmB"
PRIVATE, OTHER_PRIVATE = "/ip4/192.168.1.2/tcp/4001/p2p/QmC", "/ip4/10.0.0.7/tcp/4001/p2p/QmD"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001/p2p/QmE"
RELAYED = "/ip4/192.168.1.9/tcp/4001/p2p/QmR/p2p-circuit/p2p/QmC"


@pytest.mark.parametrize(
    ("maddr", "scope"),
    [
        (PUBLIC, Scope.PUBLIC), (OTHER_PUBLIC, Scope.PUBLIC), (PRIVATE, Scope.NETWORK), (OTHER_PRIVATE, Scope.NETWORK),
        ("/ip4/100.64.1.1/tcp/1", Scope.NETWORK), ("/ip6/fe80::1/tcp/1", Scope.NETWORK), (LOOPBACK, Scope.MACHINE),
        ("/ip6/::1/tcp/1", Scope.MACHINE), (RELAYED, Scope.PUBLIC), ("/dns4/example.org/tcp/1", Scope.PUBLIC),
        ("/memory/a/p2p/a", Scope.PUBLIC), ("/ip4/nonsense/tcp/1", Scope.PUBLIC), ("", Scope.PUBLIC),
        ("/ip4", Scope.PUBLIC),
    ],
)  # fmt: skip
def test_an_address_tells_from_where_it_can_be_dialled(maddr: str, scope: Scope) -> None:
    assert scope_of(maddr) is scope


@pytest.mark.parametrize(
    ("own", "theirs", "worth"),
    [
        ([PUBLIC], [OTHER_PUBLIC], True),
        ([PRIVATE], [PUBLIC, LOOPBACK], True),
        ([PUBLIC, LOOPBACK], [PRIVATE], False),
        ([PUBLIC, LOOPBACK], [PRIVATE, LOOPBACK], False),
        ([PUBLIC, OTHER_PRIVATE], [PRIVATE], True),
        ([PRIVATE], [OTHER_PRIVATE], True),  # one network may have several ranges
        ([PRIVATE, LOOPBACK], [LOOPBACK], True),
        ([PUBLIC], [LOOPBACK], False),
        ([PUBLIC], [], True),
        ([], [PRIVATE], True),
        ([PUBLIC], [RELAYED], True),
    ],
)
def test_only_those_are_dialled_who_may_be_reached(own: list[str], theirs: list[str], worth: bool) -> None:
    assert worth_dialling(own, theirs) is worth


class Dials:
    """A transport that reaches no peer, and records attempts."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self.inner = network.transport(peer_id)
        self.peer_id = peer_id
        self.at_s: list[float] = []

    async def open_stream(self, peer_id: str, maddrs: list[str]):  # type: ignore[no-untyped-def]
        self.at_s.append(trio.current_time())
        return await self.inner.open_stream(peer_id, maddrs)

    async def accept(self):  # type: ignore[no-untyped-def]
        return await self.inner.accept()


async def dials_within(own: str, theirs: str, seconds: float, *, relayed_after_s: float = math.inf) -> list[float]:
    """When a peer dials another, of whom it hears every few seconds and whom it does not reach."""
    network = MemoryNetwork()
    transport = Dials(network, "a")
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        links = Links(transport, lambda: hello_of("a"), Endpoint("a", nursery))  # type: ignore[arg-type]
        await nursery.start(links.run)
        membership = Membership(
            links, network.directory("a"), "test", "a", lambda: [own], random.Random(0),
        )  # fmt: skip
        nursery.start_soon(membership.run_forever)
        with trio.move_on_after(seconds):
            while True:
                membership.hint(
                    "b", (theirs, RELAYED) if trio.current_time() > began_s + relayed_after_s else (theirs,)
                )
                await trio.sleep(5)
        assert not membership.undecided
        nursery.cancel_scope.cancel()
    return transport.at_s


@pytest.mark.slow
def test_a_peer_behind_another_nat_is_soon_left_alone() -> None:
    async def main() -> None:
        assert await dials_within(PUBLIC, PRIVATE, 60) == []
        assert len(await dials_within(PRIVATE, OTHER_PRIVATE, 300)) == PRIVATE_DIALS
        assert len(await dials_within(PRIVATE, OTHER_PRIVATE, PRIVATE_RETRY_S + 60)) == PRIVATE_DIALS + 1
        assert len(await dials_within(PRIVATE, PUBLIC, 300)) > PRIVATE_DIALS + 2
        assert len(await dials_within(PRIVATE, OTHER_PRIVATE, 300, relayed_after_s=60)) > PRIVATE_DIALS + 1

    run_virtual(main)


def test_who_cannot_be_dialled_is_told_once_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            endpoint = Endpoint("a", nursery)
            endpoint.links = Links(network.transport("a"), lambda: hello_of("a"), endpoint)
            for own in ([PRIVATE, LOOPBACK], [PRIVATE, RELAYED, LOOPBACK], [PUBLIC, LOOPBACK], []):
                membership = Membership(
                    endpoint.links, network.directory("a"), "test", "a", lambda own=own: own, random.Random(0),
                )  # fmt: skip
                membership.welcome("QmF", (OTHER_PRIVATE,), "trainer")
                assert not caplog.messages
                for _ in range(2):
                    membership.welcome("QmB", (OTHER_PUBLIC,), "trainer")
                if PRIVATE in own:
                    (told,) = caplog.records
                    assert "(/ip4/192.168.1.2/tcp/4001, /ip4/127.0.0.1/tcp/4001)" in told.getMessage()
                    assert "--announce-maddrs" in told.getMessage()
                    assert told.levelname == ("INFO" if RELAYED in own else "WARNING")
                    assert ("through a relay" in told.getMessage()) is (RELAYED in own)
                else:
                    assert not caplog.records
                caplog.clear()

    with caplog.at_level("INFO", "p2ptrain.protocol.membership.membership"):
        run_virtual(main)


# --- rounds ---------------------------------------------------------------------------------------------------------


def test_two_who_cannot_reach_each_other_commit_every_round_with_a_third() -> None:
    async def main() -> None:
        async with swarm() as s:
            s.network.connected = lambda a, b: {a, b} != {"b", "c"}  # type: ignore[method-assign]
            for i, name in enumerate("abc"):
                s.start(name, founder=i == 0)
            await s.until(
                lambda: all(sum(r["group_size"] == 3 for r in p.rounds("committed")) >= 8 for p in s.peers.values())
            )
            for peer in s.peers.values():
                sizes = [r["group_size"] for r in peer.rounds()]
                assert set(sizes[sizes.index(3) :]) == {3}
                assert not any(r["late"] for r in peer.rounds()[sizes.index(3) :])
            assert set(s.peers["b"].node.links.live) == {"a"}
            assert sum(e["merged"] for e in s.peers["b"].events if e["event"] == "fragments") > 0

    run_virtual(main)


def test_a_peer_that_one_of_several_members_reaches_keeps_what_it_learns() -> None:
    """The leaders of the last rounds are barred, so the one that reaches it leads every second round."""

    async def main() -> None:
        async with swarm() as s:
            s.network.connected = lambda a, b: "e" not in (a, b) or {a, b} == {"a", "e"}  # type: ignore[method-assign]
            for i, name in enumerate("abcde"):
                s.start(name, founder=i == 0)
            e = s.peers["e"]
            await s.until(lambda: sum(r["group_size"] == 5 for r in e.rounds("committed")) > 2)
            seen = len(e.reports)
            await s.until(lambda: sum(r["group_size"] == 5 for r in e.rounds("committed")) > 12, within_s=120)
            rounds = [report.round for report in e.reports[seen:] if report.round is not None]
            assert sum(not report.late for report in rounds) >= 0.4 * len(rounds)
            assert not any(report.tokens_discarded for report in rounds)

    run_virtual(main)
