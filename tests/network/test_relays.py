"""Places at relays: what is asked, which answers will do, and streams that go through one."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError
from p2ptrain.network import relays
from p2ptrain.network.addresses import has_public_address
from p2ptrain.network.bootstrap import dial
from p2ptrain.network.circuit import HOP, HOP_CONNECT, HOP_STATUS, Fields, Status, decode, encode, receive, send
from p2ptrain.network.control import open_stream
from p2ptrain.network.daemon import probe_flags, run_daemon
from p2ptrain.network.host import Network, open_network
from p2ptrain.network.p2p import PROTOCOL_NAME
from p2ptrain.network.relays import check_answer
from p2ptrain.network.scratch import scratch_directory
from p2ptrain.protocol.membership.reachability import Scope
from tests.network.local import config, read

Run = Callable[..., Any]
OPEN = "/ip4/5.188.7.1/tcp/4001"


def answer(status: int, *, limit_s: int = 0, limit_bytes: int = 0) -> Fields:
    """What a relay says to a request for a place."""
    limit = {number: value for number, value in ((1, limit_s), (2, limit_bytes)) if value}
    said = {1: 2, 3: encode({1: 1_700_000_000, 3: b"voucher"}), 5: status}
    return decode(encode({**said, 4: encode(limit)} if limit else said))


def test_a_place_is_taken_where_circuits_are_good_enough() -> None:
    check_answer(answer(100))
    check_answer(answer(100, limit_s=86400, limit_bytes=2**40))
    check_answer(answer(100, limit_bytes=2**40))


@pytest.mark.parametrize(
    ("answered", "complaint"),
    [
        (answer(200), "status 200"),
        (answer(100, limit_s=120, limit_bytes=128 * 1024), "131072 bytes in 120 s"),
        (answer(100, limit_s=120), "120 s"),
        ({}, "status 0"),
        ({5: b"100"}, "malformed"),
        ({5: 100, 4: 7}, "malformed"),
        ({5: 100, 4: encode({1: b"long"})}, "malformed"),
    ],
)
def test_no_place_is_taken_elsewhere(answered: Fields, complaint: str) -> None:
    with pytest.raises(PeerLostError, match=complaint):
        check_answer(answered)


@pytest.mark.parametrize("body", [b"\x20", b"\x21\x01", b"\x22\x05abc", b"\x80" * 20])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(PeerLostError, match="malformed"):
        decode(body)


@given(st.binary(max_size=64))
def test_strangers_bytes_are_a_message_or_none(body: bytes) -> None:
    with contextlib.suppress(PeerLostError):
        check_answer(decode(body))


@pytest.mark.parametrize(
    ("host_maddrs", "announce_maddrs", "public"),
    [
        ([OPEN], [], True),
        (["/ip4/192.168.1.2/tcp/0"], [], False),
        (["/ip4/192.168.1.2/tcp/0"], [OPEN], True),
        (["/ip4/127.0.0.1/tcp/0", "/ip6/::1/udp/0/quic-v1"], ["/dns4/example.org/tcp/1"], True),
        (["/ip4/127.0.0.1/tcp/0"], [], False),
    ],
)
def test_who_has_a_public_address(host_maddrs: list[str], announce_maddrs: list[str], public: bool) -> None:
    assert has_public_address(host_maddrs, announce_maddrs) is public


def test_who_listens_everywhere_has_the_address_by_which_packets_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    class Routed:
        def __init__(self, family: int, kind: int) -> None:
            self.own = "5.188.7.9" if family == socket.AF_INET else ""

        def __enter__(self) -> Routed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            if not self.own:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return self.own, 1

    monkeypatch.setattr("p2ptrain.network.addresses.socket.socket", Routed)
    assert has_public_address(["/ip4/0.0.0.0/tcp/0"], [])
    assert not has_public_address(["/ip6/::/tcp/0"], [])


@contextlib.asynccontextmanager
async def open_relay(**settings: Any) -> AsyncIterator[tuple[Network, str]]:
    """A peer that says it has a public address, and where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
    async with open_network(config(host_maddrs=(at,), announce_maddrs=(OPEN,), **settings)) as relay:
        yield relay, f"{at}/p2p/{relay.peer_id}"


@contextlib.asynccontextmanager
async def open_relayed() -> AsyncIterator[tuple[str, Network, Network, str]]:
    """The control socket of a daemon that knows nobody, a relay, a peer, and that peer's address through the relay."""
    async with open_relay() as (relay, at), open_network(config(initial_peers=(at,))) as other:
        with scratch_directory() as directory:
            async with run_daemon(probe_flags(), directory / "probe.sock", 25) as probe:
                yield probe.control_path, relay, other, f"{at}/p2p-circuit/p2p/{other.peer_id}"


@pytest.fixture
def loopback_is_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "scope_of", lambda maddr: Scope.PUBLIC)


@pytest.mark.processes
def test_a_peer_is_reached_through_a_relay(run: Run, loopback_is_the_internet: None) -> None:
    async def main() -> None:
        async with open_relayed() as (probe, relay, other, circuit):
            # At once, so that this is among the first addresses that it tells anybody.
            assert circuit in other.maddrs
            await dial(probe, other.peer_id, [circuit], 10)
            ours = await open_stream(probe, other.peer_id, PROTOCOL_NAME, 10)
            data = random.Random(0).randbytes(3_000_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.send_all, data)
                theirs = await other.transport.accept()
                assert await read(theirs, len(data)) == data
                nursery.start_soon(theirs.send_all, data)
                assert await read(ours, len(data)) == data
            assert relay.transport._relay is not None
            assert relay.transport._relay._circuits[other.peer_id] == 1
            await ours.aclose()
            assert await theirs.receive_some() == b""

    run(main)


@pytest.mark.processes
def test_an_exception_in_a_renewal_costs_that_renewal_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewals = 0

    async def renew(self: relays.Relays) -> None:
        nonlocal renewals
        renewals += 1
        if 1 < renewals < 5:
            raise IndexError("an answer that nobody expected")

    async def main() -> None:
        async with open_network(config()) as network:
            while renewals < 7:
                await trio.sleep(0.01)
            assert network.maddrs

    monkeypatch.setattr("p2ptrain.network.p2p.RENEW_EVERY_S", 0.05)
    monkeypatch.setattr("p2ptrain.network.p2p.REFRESH_MADDRS_S", 0.05)
    monkeypatch.setattr(relays.Relays, "renew", renew)
    run(main)
    assert caplog.text.count("renewing places at relays failed; it is tried again") == 1


@pytest.mark.processes
def test_a_relay_that_is_full_or_unwilling_gives_no_place(run: Run, loopback_is_the_internet: None) -> None:
    async def main() -> None:
        async with open_relay(relay_peers=1) as (_, at), open_network(config(initial_peers=(at,))) as first:
            assert f"{at}/p2p-circuit/p2p/{first.peer_id}" in first.maddrs
            async with open_network(config(initial_peers=(at,))) as second:
                assert not any(maddr.startswith(f"{at}/p2p-circuit") for maddr in second.maddrs)
        async with open_relay(relay_peers=0) as (_, at), open_network(config(initial_peers=(at,))) as first:
            assert f"{at}/p2p-circuit/p2p/{first.peer_id}" not in first.maddrs

    run(main)


@pytest.mark.processes
def test_what_is_no_request_is_refused_and_costs_the_relay_nothing(run: Run, loopback_is_the_internet: None) -> None:
    async def main() -> None:
        async with open_relayed() as (probe, relay, other, circuit):
            await dial(probe, relay.peer_id, [circuit.partition("/p2p/")[0]], 10)
            for asked, status in (
                ({1: 7}, Status.MALFORMED),
                ({1: HOP_CONNECT, 2: encode({1: b"nobody"})}, Status.NO_PLACE),
                ({1: HOP_CONNECT}, Status.NO_PLACE),
            ):
                stream = await open_stream(probe, relay.peer_id, HOP, 10)
                await send(stream, asked)
                answered, _ = await receive(stream)
                assert answered[HOP_STATUS] == status
                await stream.aclose()
            for junk in (b"\xff" * 20, b"\x02\x21\x01", encode({1: HOP_CONNECT, 2: 5})):
                stream = await open_stream(probe, relay.peer_id, HOP, 10)
                await stream.send_all(junk)
                await stream.aclose()
            await dial(probe, other.peer_id, [circuit], 10)

    run(main)
