"""The interfaces of this machine, the ways through them, connections along a way, and the rate of an upload.

`tests/links/test_doctor.py` has two interfaces that differ.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trio
import trio.testing

from p2ptrain.network import ways
from p2ptrain.network.ways import (
    MOST_BYTES,
    MOST_BYTES_A_MINUTE,
    MOST_S,
    Arrival,
    Interface,
    RateCounter,
    Way,
    bytes_per_s,
    endpoints,
    forwarded,
    interfaces_of,
    upload_rate,
    ways_to,
)
from p2ptrain.protocol.wire.transport import Refusal, no_refusal
from tests.network.local import open_pair


def test_endpoints_are_those_that_tcp_reaches_without_a_relay() -> None:
    found = endpoints([
        "/ip4/192.168.1.5/tcp/4001/p2p/QmA", "/ip4/192.168.1.5/udp/4001/quic/p2p/QmA", "/ip6/fd00::2/tcp/1",
        "/dns4/example.org/tcp/4001/p2p/QmA", "/ip4/8.8.8.8/tcp/4001/p2p/QmR/p2p-circuit/p2p/QmA", "/ip4", "nonsense",
    ])  # fmt: skip
    assert list(found) == [
        (socket.AF_INET, "192.168.1.5", 4001), (socket.AF_INET6, "fd00::2", 1), (socket.AF_INET, "example.org", 4001),
    ]  # fmt: skip


def test_only_addresses_of_this_machine_towards_others_are_interfaces() -> None:
    # Loopback, link-local, and one of the network for documentation, as a router would map it.
    foreign = ["127.0.0.1", "::1", "fe80::1", "203.0.113.7"]
    found = interfaces_of(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/1" for host in foreign)
    assert not {interface.address for interface in found} & set(foreign)


def test_a_peer_on_this_machine_needs_no_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert trio.run(ways_to, [f"/dns4/localhost/tcp/{port}/p2p/QmA"], []) == []


def test_bytes_are_forwarded_along_a_way_both_ways() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            way = Way(Interface("127.0.0.2"), 0.001, used=False, target=server.getsockname())
            async with forwarded(way) as maddr:
                ((_, host, port),) = endpoints([maddr])
                near = await trio.open_tcp_stream(host, port)
                far, (source, _) = await trio.to_thread.run_sync(server.accept)
                assert source == "127.0.0.2"
                async with near, trio.SocketStream(trio.socket.from_stdlib_socket(far)) as end:
                    for sender, receiver in ((near, end), (end, near)):
                        await sender.send_all(b"hello")
                        assert await receiver.receive_some() == b"hello"
                    await end.aclose()
                    assert await near.receive_some() == b""

    trio.run(main)


def test_a_way_that_leads_nowhere_closes_the_connection() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            target = server.getsockname()
        # TEST-NET-3: no address of this machine, so nothing can be sent from it.
        async with forwarded(Way(Interface("203.0.113.7"), 0.001, used=False, target=target)) as maddr:
            ((_, host, port),) = endpoints([maddr])
            async with await trio.open_tcp_stream(host, port) as near:
                assert await near.receive_some() == b""

    trio.run(main)


def test_with_too_many_open_files_nothing_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with forwarded(Way(Interface("127.0.0.1"), 0.001, used=False, target=("127.0.0.1", 1))):
            await trio.testing.wait_all_tasks_blocked()

    refused = AsyncMock(side_effect=OSError(errno.EMFILE, "too many open files"))
    monkeypatch.setattr(trio._socket._SocketType, "accept", refused)
    trio.run(main)


Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], None),
        ([(3.0, 500)], None),
        ([(3.0, 500), (3.0, 900)], None),
        ([(3.0, 500), (4.0, 900)], 400),
        ([(3.0, 1), (4.0, 101), (5.0, 1101)], 1000),  # a slow start
        ([(0.0, 10), (0.1, 20), (1.9, 30), (2.0, 1030)], 1010 / 1.9),  # a burst after a pause is no rate
    ],
)
def test_a_rate_is_that_of_the_later_half(arrivals: list[Arrival], rate: float | None) -> None:
    assert bytes_per_s(arrivals) == (None if rate is None else pytest.approx(rate))


class Uploaded:
    """A stream from a peer that sends pieces of one size at one pace, forever."""

    def __init__(self, size: int, every_s: float, remote: str = "QmA") -> None:
        self.remote = remote
        self.sent, self.received_bytes, self.closed, self.failed = b"", 0, False, ""
        self._size, self._every_s = size, every_s

    async def receive_some(self) -> bytes:
        await trio.sleep(self._every_s)
        self.received_bytes += self._size
        return bytes(self._size)

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    async def aclose(self) -> None:
        self.closed = True

    def fail(self, reason: str) -> None:
        self.failed = reason

    @property
    def answer(self) -> int | None:
        return struct.unpack(">Q", self.sent)[0] if self.sent else None


def counted(*streams: Uploaded, pause_s: float = 60.0, refusal: Refusal = no_refusal) -> None:
    """One upload after the other, each so long after the one before."""

    async def main() -> None:
        counter = RateCounter(refusal)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(counter.service.serve)
            for stream in streams:
                await trio.testing.wait_all_tasks_blocked()
                counter.take(stream)  # type: ignore[arg-type]
                await trio.sleep(pause_s)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_peer_says_how_fast_bytes_came_and_closes_the_stream() -> None:
    slow, fast = Uploaded(1000, 0.01), Uploaded(10_000, 0.001)
    counted(slow, fast)
    assert slow.answer == pytest.approx(100_000, rel=0.01)
    assert fast.answer == pytest.approx(10_000_000, rel=0.01)
    assert slow.closed
    assert fast.closed


def test_an_upload_is_bounded_in_bytes_and_seconds() -> None:
    slow, fast = Uploaded(1000, 0.01), Uploaded(65536, 0.0001)
    counted(slow, fast)
    assert slow.received_bytes <= 1000 * MOST_S / 0.01
    assert fast.received_bytes == MOST_BYTES


def test_a_peer_that_does_not_take_its_answer_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, next_one = Uploaded(1000, 0.01), Uploaded(1000, 0.01)
    monkeypatch.setattr(deaf, "send_all", lambda _: trio.sleep_forever())
    counted(deaf, next_one)
    assert deaf.closed
    assert next_one.answer


def test_one_upload_is_counted_at_a_time() -> None:
    first, second, third = Uploaded(1000, 0.01), Uploaded(1000, 0.01), Uploaded(1000, 0.01)
    counted(first, second, third, pause_s=1.1)
    assert first.answer
    assert second.failed == "too many requests at once"
    assert not second.received_bytes
    assert third.answer is not None or third.received_bytes  # counted until the end of the test


def test_strangers_together_upload_so_much_a_minute() -> None:
    streams = [Uploaded(65536, 0.0001, remote=f"Qm{number}") for number in range(20)]
    counted(*streams, pause_s=3.0)
    most = MOST_BYTES_A_MINUTE * 2  # what it allows at once, and within the minute
    assert MOST_BYTES_A_MINUTE <= sum(stream.received_bytes for stream in streams) <= most
    assert all(stream.closed for stream in streams)


def test_what_a_slow_upload_leaves_is_given_back() -> None:
    streams = [Uploaded(1000, 0.01) for _ in range(20)]
    counted(*streams, pause_s=3.0)
    assert all(stream.answer for stream in streams)


def test_bytes_of_a_refused_peer_are_not_counted() -> None:
    refused, welcome = Uploaded(1000, 0.01, remote="QmBad"), Uploaded(1000, 0.01)
    counted(refused, welcome, refusal=lambda peer_id: "no" if peer_id == "QmBad" else None)
    assert refused.answer is None
    assert refused.closed
    assert not refused.received_bytes
    assert welcome.answer


@pytest.mark.processes
def test_the_rate_to_a_peer_on_this_machine(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            found = await upload_rate(second.transport.control_path, first.peer_id)
            assert found is not None
            assert found > 0

    run(main)


@pytest.mark.processes
def test_a_peer_that_does_not_measure_gives_no_rate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            monkeypatch.setattr(ways, "RATE", "p2ptrain/rate/0")
            assert await upload_rate(second.transport.control_path, first.peer_id) is None

    run(main)
