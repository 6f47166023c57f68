"""Reservations at relays: requests, acceptable answers, and streams through a relay."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError
from p2ptrain.network import daemon, libp2p_pb2
from p2ptrain.network._hivemind import PeerID, p2pd_pb2
from p2ptrain.network.addresses import has_public_address
from p2ptrain.network.daemon import ask, dial, open_stream, probe_flags, run_daemon
from p2ptrain.network.dial_back import DialBack, DialBacks, Standing
from p2ptrain.network.host import Network, open_network
from p2ptrain.network.libp2p_pb2 import HopMessage, Peer, Reservation, Status, StopMessage
from p2ptrain.network.process_lifetime import scratch_directory
from p2ptrain.network.punch import DialBudget, Outer, Puncher
from p2ptrain.network.relay import HOP, MAX_PUNCHERS, Relay, Reservations, _target_of, check_answer
from p2ptrain.network.socket_stream import receive_message, send_message, varint
from p2ptrain.network.transport import PROTOCOL_NAME
from p2ptrain.protocol.wire.transport import no_refusal
from tests.network.local import Given, config, read

Run = Callable[..., Any]
OPEN = "/ip4/5.188.7.1/tcp/4001"


def answer(status: int, *, limit_s: int = 0, limit_bytes: int = 0) -> HopMessage:
    """A relay's answer to a reservation request."""
    message = HopMessage(
        type=HopMessage.STATUS, status=status, reservation=Reservation(expire=10**9, voucher=b"voucher")
    )
    if limit_s:
        message.limit.duration = limit_s
    if limit_bytes:
        message.limit.data = limit_bytes
    return message


def read_message(data: bytes) -> HopMessage:
    async def main() -> HopMessage:
        message, behind = await receive_message(Given(data), HopMessage)  # type: ignore[arg-type]
        assert behind == b""
        return message

    return trio.run(main)


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
        (HopMessage(), "status 0"),
        (HopMessage.FromString(b"\x2a\x03100"), "status 0"),  # a text for its status
        (answer(77), "status 77"),
    ],
)
def test_no_place_is_taken_elsewhere(answered: HopMessage, complaint: str) -> None:
    with pytest.raises(PeerLostError, match=complaint):
        check_answer(answered)


# Bytes as in libp2p's specification, with their lengths.
@pytest.mark.parametrize(
    ("message", "data"),
    [
        (HopMessage(type=HopMessage.RESERVE), b"\x02\x08\x00"),
        (HopMessage(type=HopMessage.CONNECT, peer=Peer(id=b"abc")), b"\x09\x08\x01\x12\x05\x0a\x03abc"),
        (HopMessage(type=HopMessage.STATUS, status=Status.OK), b"\x04\x08\x02\x28\x64"),
        (StopMessage(type=StopMessage.CONNECT, peer=Peer(id=b"abc")), b"\x09\x08\x00\x12\x05\x0a\x03abc"),
        (StopMessage(type=StopMessage.STATUS, status=Status.OK), b"\x04\x08\x01\x20\x64"),
    ],
)
def test_messages_are_those_of_libp2p(message: HopMessage | StopMessage, data: bytes) -> None:
    async def main() -> None:
        stream = Given(data + b"behind")
        received, behind = await receive_message(stream, type(message))  # type: ignore[arg-type, type-var]
        assert received == message
        while some := await stream.receive_some():
            behind += some
        assert behind == b"behind"
        await send_message(stream, message)  # type: ignore[arg-type]
        assert stream.sent == data

    trio.run(main)


@pytest.mark.processes
def test_the_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    root = Path(libp2p_pb2.__file__).parents[2]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(root), f"--descriptor_set_out={tmp_path / 'set'}"]
    subprocess.run([*command, libp2p_pb2.DESCRIPTOR.name], cwd=root, check=True)
    generated = FileDescriptorProto()
    libp2p_pb2.DESCRIPTOR.CopyToProto(generated)
    (compiled,) = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    compiled.ClearField("source_code_info")
    for message in [*compiled.message_type, *generated.message_type]:
        for field in message.field:
            field.ClearField("json_name")
    assert generated == compiled


@pytest.mark.parametrize("body", [b"\x20", b"\x21\x01", b"\x22\x05abc", b"\x80" * 20])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    for data in (bytes([len(body)]) + body, body):
        with pytest.raises(PeerLostError, match=r"malformed|ended"):
            read_message(data)


def test_a_message_without_end_is_refused() -> None:
    for data in (b"\xff" * 10, varint(4097) + bytes(5000)):
        with pytest.raises(PeerLostError, match="malformed"):
            read_message(data)


def test_a_long_peer_id_is_not_parsed() -> None:
    """Encoding one in base 58 takes quadratic time, on the network thread."""
    assert _target_of(HopMessage(peer=Peer(id=bytes(64)))) == 64 * "1"
    with pytest.raises(PeerLostError, match="malformed"):
        _target_of(HopMessage(peer=Peer(id=bytes(65))))


@given(st.binary(max_size=64))
def test_strangers_bytes_are_a_message_or_none(body: bytes) -> None:
    with contextlib.suppress(PeerLostError):
        check_answer(read_message(varint(len(body)) + body))


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
    """A peer that announces a public address, and its listening address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
    async with open_network(config(host_maddrs=(at,), announce_maddrs=(OPEN,), **settings)) as relay:
        yield relay, f"{at}/p2p/{relay.peer_id}"


@contextlib.asynccontextmanager
async def open_relayed() -> AsyncIterator[tuple[str, Network, Network, str]]:
    """A daemon's control socket, a relay, a peer, and that peer's address through the relay."""
    async with open_relay() as (relay, at), open_network(config(initial_peers=(at,))) as other:
        with scratch_directory() as directory:
            async with run_daemon(probe_flags(), directory / "probe.sock", 25) as probe:
                yield probe.control_path, relay, other, f"{at}/p2p-circuit/p2p/{other.peer_id}"


@pytest.fixture
def loopback_is_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.network.daemon.is_direct_public", lambda maddr: True)


class Flood:
    """A stream that always has bytes to read, and counts those written to it."""

    def __init__(self, pieces: int = 10**9) -> None:
        self.pieces = pieces
        self.received = 0

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.pieces == 0:
            await trio.sleep_forever()
        self.pieces -= 1
        return bytes(10_000)

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.received += len(data)


def test_a_relay_carries_no_more_than_its_rate_and_a_quarter_of_it_for_a_pair() -> None:
    """8 Mbit/s are 1 MB/s, and half a second of it may pass at once."""

    async def carried(pairs: int) -> list[int]:
        relay = Relay("", 32, 8.0, no_refusal)
        ends = [(Flood(), Flood()) for _ in range(pairs)]
        with trio.move_on_after(100):
            async with trio.open_nursery() as nursery:
                for one, other in ends:
                    nursery.start_soon(relay._carry, one, other)
        return [one.received + other.received for one, other in ends]

    (alone,) = trio.run(carried, 1, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 24e6 < alone <= 0.25 * 1e6 * 100.5
    shared = trio.run(carried, 8, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 98e6 < sum(shared) <= 1e6 * 100.5
    assert min(shared) > 0.9 * max(shared)


def test_a_relay_delays_nothing_below_its_rate() -> None:
    async def main() -> None:
        relay, other = Relay("", 32, 8.0, no_refusal), Flood(0)
        with trio.move_on_after(1e-6):
            await relay._carry(Flood(12), other)  # type: ignore[arg-type]
        assert other.received == 120_000

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_relay_lists_connections_once_a_second_and_again_for_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    connected, lists = {"a": "/ip4/5.188.7.2/tcp/1", "b": "/ip4/5.188.7.4/tcp/2"}, 0

    async def connections(path: str, timeout_s: float) -> list[tuple[str, str]]:
        nonlocal lists
        lists += 1
        return list(connected.items())

    async def main() -> None:
        relay = Relay("", 32, 8.0, no_refusal)
        for _ in range(10):
            assert await relay._outer_addresses("a", "b") == {"a": ("5.188.7.2", 1), "b": ("5.188.7.4", 2)}
        assert lists == 1
        connected["c"] = "/ip4/5.188.7.5/tcp/3"
        await trio.sleep(0.1)
        assert (await relay._outer_addresses("a", "c"))["c"] == ("5.188.7.5", 3)
        assert lists == 2
        await trio.sleep(1.1)
        await relay._outer_addresses("a", "b")
        assert lists == 3

    monkeypatch.setattr(daemon, "connections", connections)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_peer_asks_a_relay_so_often_a_minute_for_direct_connections() -> None:
    async def main() -> None:
        relay = Relay("", 32, 8.0, no_refusal)
        assert [relay._may_punch("a") for _ in range(40)] == 32 * [True] + 8 * [False]
        assert relay._may_punch("b")
        await trio.sleep(60)
        assert relay._may_punch("a")
        for number in range(3000):
            relay._may_punch(f"stranger{number}")
        assert len(relay._punches) <= MAX_PUNCHERS

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.processes
def test_a_peer_is_reached_through_a_relay(run: Run, loopback_is_the_internet: None) -> None:
    async def main() -> None:
        async with open_relayed() as (probe, relay, other, circuit):
            # At once, so that it is among the first addresses that it announces.
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

    async def renew(self: Reservations) -> None:
        nonlocal renewals
        renewals += 1
        if 1 < renewals < 5:
            raise IndexError("an unexpected answer")

    async def main() -> None:
        async with open_network(config()) as network:
            while renewals < 7:
                await trio.sleep(0.01)
            assert network.maddrs

    monkeypatch.setattr("p2ptrain.network.transport.RENEW_EVERY_S", 0.05)
    monkeypatch.setattr("p2ptrain.network.transport.REFRESH_MADDRS_S", 0.05)
    monkeypatch.setattr(Reservations, "renew", renew)
    run(main)
    (logged,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert "renewing reservations at relays failed; it is tried again" in logged


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
def test_a_peer_that_is_denied_gets_no_place_and_a_changed_file_is_read_again(
    run: Run, loopback_is_the_internet: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("p2ptrain.network.host.READ_ACCESS_EVERY_S", 0.01)
    deny = tmp_path / "deny.txt"
    deny.write_text("# nobody yet\n", encoding="utf-8")

    async def main() -> None:
        async with open_relay(deny=str(deny)) as (relay, at), open_network(config()) as other:
            deny.write_text(f"{other.peer_id}\n", encoding="utf-8")
            while relay.access.refusal(other.peer_id) is None:
                await trio.sleep(0.01)
            await dial(other.transport.control_path, relay.peer_id, [at], 10)
            for request in (HopMessage(type=HopMessage.RESERVE), HopMessage(type=HopMessage.CONNECT)):
                stream = await open_stream(other.transport.control_path, relay.peer_id, HOP, 10)
                await send_message(stream, request)
                answered, _ = await receive_message(stream, HopMessage)
                assert answered.status == Status.PERMISSION_DENIED
                await stream.aclose()

    run(main)


@pytest.mark.processes
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_peer_whose_public_address_nobody_reaches_uses_relays(
    run: Run,
    loopback_is_the_internet: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_silent: bool,
) -> None:
    """From its start, also if there is no answer in time; and it is no relay while others say so."""
    told = trio.Event()

    async def ask(self: DialBacks) -> float:
        if is_silent and not told.is_set():
            self.standing = Standing(is_suspected=True)
            await told.wait()
        self.standing = Standing({"ip4": DialBack.REACHED if told.is_set() else DialBack.FAILED})
        self.told.set()
        return 0.01

    async def status_of_relay(network: Network, peer_id: str) -> int:
        stream = await open_stream(network.transport.control_path, peer_id, HOP, 10)
        await send_message(stream, HopMessage(type=HopMessage.RESERVE))
        answered, _ = await receive_message(stream, HopMessage)
        return int(answered.status)

    async def main() -> None:
        async with open_relay() as (relay, at):
            monkeypatch.setattr("p2ptrain.network.transport.has_public_address", lambda *_: True)
            async with open_network(config(initial_peers=(at,))) as peer:
                circuit = f"{at}/p2p-circuit/p2p/{peer.peer_id}"
                assert circuit in peer.maddrs
                if is_silent:
                    assert await status_of_relay(relay, peer.peer_id) == Status.OK
                else:
                    with pytest.raises(PeerLostError):
                        await status_of_relay(relay, peer.peer_id)
                told.set()
                while circuit in peer.maddrs:
                    await trio.sleep(0.01)
                assert await status_of_relay(relay, peer.peer_id) == Status.OK

    monkeypatch.setattr("p2ptrain.network.transport.FIRST_DIAL_BACK_S", 0.1)
    if is_silent:  # a place that was taken on suspicion is given up with the next renewal
        monkeypatch.setattr("p2ptrain.network.transport.RENEW_EVERY_S", 0.1)
    monkeypatch.setattr(DialBacks, "ask", ask)
    # The peer listens on loopback alone.
    monkeypatch.setattr("p2ptrain.network.transport.is_direct_public", lambda maddr: "p2p-circuit" not in maddr)
    with caplog.at_level(logging.INFO):
        run(main)
    assert ("a firewall blocks it" in caplog.text) is not is_silent
    assert ("peers in other networks can dial this peer now" in caplog.text) is not is_silent


@pytest.mark.processes
def test_what_is_no_request_is_refused_and_costs_the_relay_nothing(run: Run, loopback_is_the_internet: None) -> None:
    async def main() -> None:
        async with open_relayed() as (probe, relay, other, circuit):
            await dial(probe, relay.peer_id, [circuit.partition("/p2p/")[0]], 10)
            for asked, status in (
                (HopMessage(), Status.MALFORMED_MESSAGE),
                (HopMessage(type=HopMessage.STATUS), Status.MALFORMED_MESSAGE),
                (HopMessage.FromString(b"\x08\x07"), Status.MALFORMED_MESSAGE),  # of a type that there is not
                (HopMessage(type=HopMessage.CONNECT, peer=Peer(id=b"nobody")), Status.NO_RESERVATION),
                (HopMessage(type=HopMessage.CONNECT), Status.NO_RESERVATION),
            ):
                stream = await open_stream(probe, relay.peer_id, HOP, 10)
                await send_message(stream, asked)
                answered, _ = await receive_message(stream, HopMessage)
                assert answered.status == status
                await stream.aclose()
            for junk in (b"\xff" * 20, b"\x02\x21\x01", b"\x04\x08\x01\x10\x05"):
                stream = await open_stream(probe, relay.peer_id, HOP, 10)
                await stream.send_all(junk)
                await stream.aclose()
            await dial(probe, other.peer_id, [circuit], 10)

    run(main)


@pytest.mark.processes
def test_a_relay_tells_two_peers_to_dial_each_other_where_it_sees_them(
    run: Run, loopback_is_the_internet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Outer]] = []

    async def note(self: Puncher, peer_id: str, outer: Outer, _: DialBudget, **how: object) -> None:
        told.append((peer_id, outer))

    async def main() -> None:
        async with open_relay() as (_, at), open_network(config(initial_peers=(at,))) as one:
            async with open_network(config(initial_peers=(at,))) as other:
                puncher = one.transport._puncher
                # The relay sees both at one address, and so behind one router.
                await puncher.reach(other.peer_id, other.maddrs)
                assert not told
                outer = {one.peer_id: ("5.188.7.2", 4001), other.peer_id: ("5.188.7.4", 4002)}

                async def outer_addresses(self: Relay, *peer_ids: str) -> dict[str, Outer]:
                    return outer

                monkeypatch.setattr(Relay, "_outer_addresses", outer_addresses)
                await puncher.reach(other.peer_id, other.maddrs)
                while len(told) < 2:
                    await trio.sleep(0.01)
                assert sorted(told) == sorted(outer.items())

    async def connected(self: Puncher) -> dict[str, bool]:
        """Without routers they find each other through libp2p's DHT."""
        return {}

    monkeypatch.setattr(Puncher, "_punch", note)
    monkeypatch.setattr(Puncher, "_connected", connected)
    run(main)


@pytest.mark.processes
def test_a_relay_with_an_allow_list_serves_its_members_and_ends_circuits_of_who_is_taken_off(
    run: Run, loopback_is_the_internet: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("p2ptrain.network.host.READ_ACCESS_EVERY_S", 0.01)
    monkeypatch.setattr("p2ptrain.network.relay.ASK_REFUSAL_EVERY_S", 0.01)
    allow = tmp_path / "members.txt"
    allow.write_text("# nobody yet\n", encoding="utf-8")

    async def main() -> None:
        async with open_relay(allow=str(allow)) as (relay, at), open_network(config(initial_peers=(at,))) as other:
            places, carrier = other.transport._reservations, relay.transport._relay
            assert carrier is not None
            assert not places.maddrs
            with scratch_directory() as directory:
                async with run_daemon(probe_flags(), directory / "probe.sock", 25) as probe:
                    identify = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
                    told = await ask(probe.control_path, identify, 10)
                    probe_id = PeerID(told.identify.id).to_base58()
                    allow.write_text(f"{probe_id}\n{other.peer_id}\n", encoding="utf-8")
                    while relay.access.refusal(probe_id) or relay.access.refusal(other.peer_id):
                        await trio.sleep(0.01)
                    places._refused._until_s.clear()
                    await places.renew()
                    circuit = f"{places.maddrs[0]}/p2p/{other.peer_id}"
                    await dial(probe.control_path, other.peer_id, [circuit], 10)
                    stream = await open_stream(probe.control_path, other.peer_id, PROTOCOL_NAME, 10)
                    await stream.send_all(b"x")
                    theirs = await other.transport.accept()
                    assert await theirs.receive_some() == b"x"

                    assert carrier._circuits[other.peer_id] == 1
                    allow.write_text(f"{other.peer_id}\n", encoding="utf-8")
                    while carrier._circuits:
                        await trio.sleep(0.01)

    run(main)


@pytest.mark.processes
def test_a_peer_takes_no_place_at_a_relay_that_it_does_not_allow(
    run: Run, loopback_is_the_internet: None, tmp_path: Path
) -> None:
    allow = tmp_path / "members.txt"

    async def main() -> None:
        async with open_relay() as (relay, at):
            for allowed in (True, False):
                allow.write_text(f"{relay.peer_id}\n" if allowed else "", encoding="utf-8")
                async with open_network(config(initial_peers=(at,), allow=str(allow))) as peer:
                    assert any("p2p-circuit" in maddr for maddr in peer.maddrs) is allowed

    run(main)
