"""Direct connections between two peers behind routers: when they are tried, and what a relay may make us do,
and how two joined connections end.

With routers: `tests/links/test_nat.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError
from p2ptrain.network import punch
from p2ptrain.network._hivemind import Multiaddr, PeerID
from p2ptrain.network.joined import End, joined
from p2ptrain.network.libp2p_pb2 import Peer, Status, StopMessage
from p2ptrain.network.punch import DialBudget, Outer, Puncher, meeting_points, outer_of, peer_at, read_peer
from p2ptrain.network.socket_stream import framed, receive_message
from p2ptrain.network.thread import from_asyncio
from p2ptrain.protocol.wire.transport import Refusal, no_refusal
from tests.network.local import Given, end_of, two_listening

Run = Callable[..., Any]
LOW, HIGH = "QmT39SiCLsihBULmKLj45vkEnKHZMs3ks2ExyC7NERCZAY", "QmZ9wqi8bezKNB4JpHXKTA7ZpbuH2QNWWPcHRRSefoEtsz"
RELAY = "QmUSMyzY55Bey5YDUqZbiVHG2T37JZRZEqFnNkhpKewoEt"
AT_RELAY = f"/ip4/5.188.7.1/tcp/4001/p2p/{RELAY}"
PRIVATE = f"/ip4/192.168.1.5/tcp/4001/p2p/{LOW}"
OUTER = ("5.188.7.2", 4001)


@pytest.mark.parametrize(
    ("maddrs", "points"),
    [
        ([PRIVATE, f"{AT_RELAY}/p2p-circuit/p2p/{LOW}"], [AT_RELAY]),
        ([f"{AT_RELAY}/p2p-circuit/p2p/{LOW}", f"/ip4/127.0.0.1/tcp/1/p2p/{LOW}"], [AT_RELAY]),
        ([f"/ip4/5.188.7.9/tcp/4001/p2p/{LOW}", f"{AT_RELAY}/p2p-circuit/p2p/{LOW}"], [AT_RELAY]),
        ([PRIVATE], []),
        ([], []),
    ],
)
def test_a_peer_is_met_at_its_relays(maddrs: list[str], points: list[str]) -> None:
    assert meeting_points(maddrs) == points


@pytest.mark.parametrize(
    ("maddr", "outer"),
    [
        ("/ip4/5.188.7.2/tcp/4001", OUTER),
        ("/ip4/192.168.1.5/tcp/4001", None),
        ("/ip4/127.0.0.1/tcp/4001", None),
        ("/ip4/5.188.7.2/udp/4001/quic-v1", None),
        ("/ip6/2001:4860:4860::8888/tcp/4001", None),
        (f"{AT_RELAY}/p2p-circuit", None),
        ("", None),
    ],
)
def test_an_outer_address_is_a_public_tcp_port(maddr: str, outer: Outer | None) -> None:
    assert outer_of(maddr) == outer


def test_a_peer_and_its_address_survive_the_message() -> None:
    assert read_peer(peer_at(LOW, OUTER)) == (LOW, OUTER)


@pytest.mark.parametrize(
    "peer",
    [
        Peer(),
        Peer(id=peer_at(LOW, OUTER).id),
        Peer(id=peer_at(LOW, OUTER).id, addrs=[b"junk"]),
        Peer(id=peer_at(LOW, OUTER).id, addrs=[Multiaddr("/ip4/10.0.0.1/tcp/22").to_bytes()]),
        Peer(id=peer_at(LOW, OUTER).id, addrs=2 * list(peer_at(LOW, OUTER).addrs)),
        Peer(id=bytes(65), addrs=peer_at(LOW, OUTER).addrs),
    ],
)
def test_only_one_public_address_of_a_peer_is_dialled(peer: Peer) -> None:
    with pytest.raises(PeerLostError, match="malformed"):
        read_peer(peer)


@given(
    st.binary(max_size=64) | st.just(peer_at(LOW, OUTER).id),
    st.binary(max_size=64)
    | st.builds(
        lambda ip, port: Multiaddr(f"/ip4/{ip}/tcp/{port}").to_bytes(), st.ip_addresses(v=4), st.integers(0, 65535)
    ),
)
def test_a_relays_bytes_are_an_address_or_none(peer_id: bytes, address: bytes) -> None:
    try:
        _, (host, port) = read_peer(Peer(id=peer_id, addrs=[address]))
    except PeerLostError:
        return
    assert outer_of(f"/ip4/{host}/tcp/{port}") == (host, port)


class FromRelay(Given):
    """A relay's stream, with all that it sends."""

    remote = RELAY
    is_closed = False
    failed = ""

    def __init__(self, *messages: StopMessage) -> None:
        super().__init__(b"".join(map(framed, messages)))

    async def aclose(self) -> None:
        self.is_closed = True

    def fail(self, reason: str) -> None:
        self.failed = reason

    def statuses(self) -> list[int]:
        async def main() -> list[int]:
            message, rest = await receive_message(Given(self.sent), StopMessage)  # type: ignore[arg-type]
            assert not rest
            return [message.status]

        return trio.run(main) if self.sent else []


def asked(
    me: str,
    *messages: StopMessage,
    relays: tuple[str, ...] = (RELAY,),
    asking: str = "",
    refusal: Refusal = no_refusal,
    connected: dict[str, bool] | None = None,
) -> tuple[list[int], list[tuple[str, Outer]]]:
    """What a peer answers when a relay sends it these messages, and whom it dials where."""
    dialled: list[tuple[str, Outer]] = []
    puncher, stream = Puncher("", me, lambda: [], lambda: relays, refusal, has_public_ip4=False), FromRelay(*messages)
    if asking:
        puncher._asking.add(asking)

    async def note(peer_id: str, outer: Outer, _: DialBudget, *, asked: bool, port: int | None) -> None:
        assert asked
        assert stream.is_closed, "the relay could see when the dial ends"
        dialled.append((peer_id, outer))

    async def listed() -> dict[str, bool]:
        return connected or {}

    async def main() -> None:
        puncher._punch = note  # type: ignore[method-assign]
        puncher._connected = listed  # type: ignore[method-assign]
        await puncher._answer(stream)  # type: ignore[arg-type]
        assert not puncher._asked

    try:
        trio.run(main)
    except PeerLostError:
        assert not dialled
    return stream.statuses(), dialled


NOW = StopMessage(type=StopMessage.STATUS, status=Status.OK)


def request_of(peer_id: str) -> StopMessage:
    return StopMessage(type=StopMessage.CONNECT, peer=peer_at(peer_id, OUTER))


def test_a_peer_dials_when_its_relay_says_so() -> None:
    assert asked(HIGH, request_of(LOW), NOW) == ([Status.OK], [(LOW, OUTER)])
    assert asked(HIGH, request_of(LOW)) == ([Status.OK], [])
    not_now = StopMessage(type=StopMessage.STATUS, status=Status.CONNECTION_FAILED)
    assert asked(HIGH, request_of(LOW), not_now) == ([Status.OK], [])


def test_a_peer_dials_for_no_other_relay_and_no_refused_peer() -> None:
    denied: tuple[list[int], list[Any]] = ([Status.PERMISSION_DENIED], [])
    assert asked(HIGH, request_of(LOW), NOW, relays=(LOW,)) == denied
    assert asked(HIGH, request_of(LOW), NOW, refusal=lambda peer_id: "no" if peer_id == LOW else None) == denied
    assert asked(HIGH, StopMessage(type=StopMessage.CONNECT, peer=Peer(id=b"x")), NOW) == ([], [])


def test_a_peer_does_not_dial_a_connected_peer() -> None:
    """A relay could name such a peer with an address of its own, and keep what is joined to it open."""
    assert asked(HIGH, request_of(LOW), NOW, connected={LOW: True}) == ([Status.PERMISSION_DENIED], [])
    assert asked(HIGH, request_of(LOW), NOW, connected={LOW: False}) == ([Status.OK], [(LOW, OUTER)])


def test_strangers_streams_take_no_place() -> None:
    puncher = Puncher("", HIGH, lambda: [], lambda: [RELAY], no_refusal, has_public_ip4=False)
    strangers, relayed = [FromRelay() for _ in range(2 * punch.MAX_AT_ONCE)], FromRelay()
    for stranger in strangers:
        stranger.remote = LOW
        puncher.take(stranger)  # type: ignore[arg-type]
    puncher.take(relayed)  # type: ignore[arg-type]
    assert {stranger.failed for stranger in strangers} == {"no relay of ours"}
    assert not relayed.failed


def test_when_both_ask_the_lower_ids_request_counts() -> None:
    assert asked(HIGH, request_of(LOW), NOW, asking=LOW) == ([Status.OK], [(LOW, OUTER)])
    assert asked(LOW, request_of(HIGH), NOW, asking=HIGH) == ([Status.PERMISSION_DENIED], [])


def answers(peers: list[str], dial: Callable[[], Any], relays: tuple[str, ...] = (RELAY,)) -> list[int]:
    """What a peer answers when these relays in turn ask it for these peers, one after the other, and it dials so."""
    streams = [FromRelay(request_of(peer_id), NOW) for peer_id in peers]

    async def main() -> None:
        puncher = Puncher("", "Qm", lambda: [], lambda: relays, no_refusal, has_public_ip4=False)
        puncher._connected = nobody  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Puncher, "_join", lambda *_: dial())
            patch.setattr(punch, "MAX_FAILED", 4)
            for stream, relay in zip(streams, itertools.cycle(relays), strict=False):
                stream.remote = relay
                await puncher._answer(stream)  # type: ignore[arg-type]
                assert len(puncher._for(relay).failed) <= 4
                assert not len(puncher._ours.failed)

    trio.run(main, clock=trio.testing.MockClock())
    return [status for stream in streams for status in stream.statuses()]


async def fail() -> None:
    raise PeerLostError("the router lets nothing in")


def an_end() -> Mock:
    return Mock(transport=Mock(is_closing=Mock(return_value=True)))


async def connected() -> Mock:
    """A dial that ends at once."""
    return an_end()


async def join_after_a_second() -> Mock:
    await trio.sleep(1)
    return an_end()


async def nobody() -> dict[str, bool]:
    return {}


STRANGERS = [PeerID(bytes([18, 32, *[0] * 31, number])).to_base58() for number in range(40)]


def test_a_peer_that_was_dialled_in_vain_is_not_dialled_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks, and however often: a stranger can have a relay ask."""
    with caplog.at_level(logging.INFO):
        assert answers([LOW, LOW, STRANGERS[0], LOW], fail) == [
            Status.OK, Status.PERMISSION_DENIED, Status.OK, Status.PERMISSION_DENIED,
        ]  # fmt: skip
    assert not caplog.records


def test_a_peer_dials_so_often_a_minute_for_its_relays() -> None:
    statuses = answers(STRANGERS, connected)
    assert statuses == punch.MAX_A_MINUTE * [Status.OK] + (40 - punch.MAX_A_MINUTE) * [Status.PERMISSION_DENIED]


def test_one_relay_uses_up_nothing_of_another_and_its_failures_are_its_own() -> None:
    statuses = answers(STRANGERS, connected, (RELAY, LOW))
    assert statuses == 40 * [Status.OK]
    assert answers([STRANGERS[0], STRANGERS[0], STRANGERS[0]], fail, (RELAY, LOW)) == [
        Status.OK, Status.OK, Status.PERMISSION_DENIED,
    ]  # fmt: skip


def test_a_false_address_from_a_relay_keeps_us_from_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """We still ask for it ourselves, but at no relay that we refuse."""
    refused, asked_at = STRANGERS[1], []

    async def ask(point: str, peer_id: str) -> Outer:
        asked_at.append(point)
        raise PeerLostError("not now")

    async def main() -> None:
        puncher = Puncher(
            "", "Qm", lambda: [], lambda: [RELAY], lambda peer: "no" if peer == refused else None, has_public_ip4=False
        )
        puncher._connected, puncher._ask = nobody, ask  # type: ignore[method-assign]
        monkeypatch.setattr(Puncher, "_join", lambda *_: fail())
        await puncher._answer(FromRelay(request_of(LOW), NOW))  # type: ignore[arg-type]
        at_refused = f"/ip4/5.188.7.9/tcp/22/p2p/{refused}/p2p-circuit/p2p/{LOW}"
        await puncher.reach(LOW, [at_refused])
        assert not asked_at
        await puncher.reach(LOW, [at_refused, f"{AT_RELAY}/p2p-circuit/p2p/{LOW}"])
        assert asked_at == [AT_RELAY]

    trio.run(main)


@pytest.mark.parametrize("has_public", [False, True])
def test_a_peer_with_a_public_address_names_the_port_from_which_it_dials(has_public: bool) -> None:
    """Behind a router the port outside is another one, and that from which it listens is known to its relay."""
    joined_from: list[int | None] = []

    async def join(self: Puncher, peer_id: str, outer: Outer, port: int | None) -> Mock:
        joined_from.append(port)
        return an_end()

    async def main() -> None:
        puncher = Puncher("", HIGH, lambda: [], lambda: [RELAY], no_refusal, has_public_ip4=has_public)
        puncher._connected = nobody  # type: ignore[method-assign]
        stream = FromRelay(request_of(LOW), NOW)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Puncher, "_join", join)
            await puncher._answer(stream)  # type: ignore[arg-type]
        answer, _ = await receive_message(Given(stream.sent), StopMessage)  # type: ignore[arg-type]
        (port,) = joined_from
        assert (port is not None) is has_public
        assert punch.outer_named(answer, OUTER) == (OUTER[0], port or OUTER[1])

    trio.run(main)


@pytest.mark.parametrize(
    "address", [b"", b"junk", Multiaddr("/ip4/9.9.9.9").to_bytes(), Multiaddr("/tcp/0").to_bytes()]
)
def test_a_port_that_is_none_is_ignored(address: bytes) -> None:
    answer = StopMessage(type=StopMessage.STATUS, status=Status.OK, peer=Peer(id=b"x", addrs=[address]))
    assert punch.outer_named(answer, OUTER) == OUTER
    assert punch.outer_named(NOW, OUTER) == OUTER


def test_of_the_peer_that_asks_the_daemon_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[tuple[str, list[str]]] = []

    async def dial_it(control_path: str, peer_id: str, maddrs: list[str], timeout_s: float) -> None:
        dialled.append((peer_id, maddrs))

    async def ask(point: str, peer_id: str) -> Outer:
        return OUTER

    async def main() -> None:
        puncher = Puncher("", HIGH, lambda: [], lambda: [RELAY], no_refusal, has_public_ip4=True)
        puncher._connected, puncher._ask = nobody, ask  # type: ignore[method-assign]
        puncher._join = Mock(side_effect=AssertionError)  # type: ignore[method-assign]
        await puncher.reach(LOW, [f"{AT_RELAY}/p2p-circuit/p2p/{LOW}"])
        assert LOW not in puncher._ours.failed

    monkeypatch.setattr(punch, "dial", dial_it)
    trio.run(main)
    assert dialled == [(LOW, ["/ip4/5.188.7.2/tcp/4001"])]


def test_so_many_connections_are_joined_for_a_relay() -> None:
    ends = [Mock(transport=Mock(is_closing=Mock(return_value=False))) for _ in range(punch.MAX_JOINED)]

    async def main() -> None:
        for_one, for_other = DialBudget(), DialBudget()
        for end in ends:
            assert for_one.may_dial(LOW)
            for_one.keep(end)
        await trio.sleep(60)  # so that as many may be dialled again
        assert not for_one.may_dial(LOW)
        assert for_other.may_dial(LOW)
        ends[3].transport.is_closing.return_value = True
        assert for_one.may_dial(LOW)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class ThatGoes(FromRelay):
    """A relay that is not ours any more when it is time to dial."""

    def __init__(self, peer_id: str, relays: list[str]) -> None:
        super().__init__(request_of(peer_id), NOW)
        self._relays = relays

    async def aclose(self) -> None:
        self._relays.clear()


def test_a_relay_that_is_not_ours_for_a_moment_has_the_limits_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost packet can do that: our request for a longer reservation is then not answered in time."""
    relays: list[str] = []
    puncher = Puncher("", "Qm", lambda: [], lambda: relays, no_refusal, has_public_ip4=False)

    async def answer(stream: FromRelay) -> list[int]:
        await puncher._answer(stream)  # type: ignore[arg-type]
        message, _ = await receive_message(Given(stream.sent), StopMessage)  # type: ignore[arg-type]
        return [message.status]

    async def main() -> None:
        statuses = []
        for peer_id in [*STRANGERS, STRANGERS[0]]:
            relays[:] = [RELAY]
            statuses += await answer(ThatGoes(peer_id, relays))
        assert statuses == punch.MAX_A_MINUTE * [Status.OK] + (41 - punch.MAX_A_MINUTE) * [Status.PERMISSION_DENIED]
        await trio.sleep(60)
        relays[:] = [RELAY]
        assert await answer(ThatGoes(STRANGERS[0], relays)) == [Status.PERMISSION_DENIED]
        for count in range(1, punch.MAX_COUNTED_RELAYS):
            puncher._for(STRANGERS[count]).failed.add(LOW)
        with pytest.raises(PeerLostError, match="16 other relays"):
            puncher._for(STRANGERS[0])
        await trio.sleep(punch.FAILED_S)
        assert not len(puncher._for(STRANGERS[0]).failed)
        assert list(puncher._for_relay) == [STRANGERS[0]]

    monkeypatch.setattr(puncher, "_connected", nobody)
    monkeypatch.setattr(Puncher, "_join", lambda *_: fail())
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_connections_that_may_yet_be_joined_count_as_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    puncher = Puncher("", "Qm", lambda: [], lambda: [RELAY], no_refusal, has_public_ip4=False)
    streams = [FromRelay(request_of(peer_id), NOW) for peer_id in STRANGERS[: punch.MAX_AT_ONCE]]
    late = FromRelay(request_of(LOW), NOW)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(puncher._answer, stream)
        await puncher._answer(late)  # type: ignore[arg-type]

    monkeypatch.setattr(punch, "MAX_JOINED", 3)
    monkeypatch.setattr(puncher, "_connected", nobody)
    monkeypatch.setattr(Puncher, "_join", lambda *_: join_after_a_second())
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    statuses = [status for stream in streams for status in stream.statuses()]
    assert (statuses.count(Status.OK), statuses.count(Status.PERMISSION_DENIED)) == (3, punch.MAX_AT_ONCE - 3)
    assert late.statuses() == [Status.OK]


def test_failures_of_many_strangers_are_forgotten() -> None:
    assert answers(STRANGERS[: punch.MAX_A_MINUTE], fail) == punch.MAX_A_MINUTE * [Status.OK]


def test_a_connection_that_p2pd_does_not_confirm_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(Puncher, "_connected", lambda _: fail())
        async with two_listening() as (p2pd, far):
            host, port = p2pd.getsockname()
            maddr = f"/ip4/{host}/tcp/{port}/p2p/{HIGH}"
            puncher = Puncher("", HIGH, lambda: [maddr], lambda: [], no_refusal, has_public_ip4=False)
            budget = DialBudget()
            await puncher._punch(LOW, far.getsockname(), budget, asked=True)
            assert LOW in budget.failed
            for listening in (far, p2pd):
                connection, _ = await listening.accept()
                assert await end_of(connection) == b""

    run(main)


def test_what_arrives_on_one_of_two_joined_connections_leaves_on_the_other(run: Run) -> None:
    """From the port on which another socket listens."""

    async def main() -> None:
        async with two_listening() as (p2pd, far):
            async with joined(p2pd.getsockname(), far.getsockname()):
                (theirs, address), (ours, _) = await far.accept(), await p2pd.accept()
            assert address == p2pd.getsockname()
            data = bytes(range(256)) * 8192
            async with trio.open_nursery() as nursery:
                for sender, receiver in ((theirs, ours), (ours, theirs)):
                    nursery.start_soon(trio.SocketStream(sender).send_all, data)
                    received = bytearray()
                    while len(received) < len(data):
                        received += await receiver.recv(65536)
                    assert received == data
            theirs.close()
            assert await end_of(ours) == b""

    run(main)


@pytest.mark.parametrize("sent", [b"", b"hello"])
def test_a_connection_that_ends_before_it_is_joined_ends_the_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """What it has sent still arrives."""

    async def main() -> None:
        async with two_listening() as (p2pd, far):
            bridged = from_asyncio

            async def send_and_close(coroutine: Any) -> Any:
                """After the first connection, and before the second."""
                result = await bridged(coroutine)
                if result is not None:
                    monkeypatch.setattr("p2ptrain.network.joined.from_asyncio", bridged)
                    theirs, _ = await far.accept()
                    await theirs.send(sent)
                    theirs.close()
                    await trio.testing.wait_all_tasks_blocked()
                return result

            monkeypatch.setattr("p2ptrain.network.joined.from_asyncio", send_and_close)
            async with joined(p2pd.getsockname(), far.getsockname()):
                ours, _ = await p2pd.accept()
            assert await end_of(ours) == sent

    run(main)


def test_a_peer_that_reads_nothing_keeps_no_connection_open(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("p2ptrain.network.joined.LINGER_S", 0.0)
        aborted = trio.Event()
        end = End()
        end.other = Mock(abort=aborted.set)
        end.connection_lost(None)
        await aborted.wait()

    run(main)


def test_a_closed_port_is_a_lost_peer(run: Run) -> None:
    async def main() -> None:
        async with two_listening() as (p2pd, far):
            silent = far.getsockname()
            far.close()
            with pytest.raises(PeerLostError, match="dialling from port"):
                async with joined(p2pd.getsockname(), silent):
                    pass

    run(main)
