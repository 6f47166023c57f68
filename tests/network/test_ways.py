"""The interfaces of this machine, the ways through them, and connections that are forwarded along a way.

`tests/links/test_doctor.py` has two interfaces that differ.
"""

from __future__ import annotations

import errno
import socket
from unittest.mock import AsyncMock

import pytest
import trio
import trio.testing

from p2ptrain.network.ways import Interface, Way, endpoints, forwarded, interfaces_of, ways_to


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
