"""The interfaces of this machine, and the ways through them; tests/links/test_doctor.py has two that differ."""

from __future__ import annotations

import socket

import trio

from p2ptrain.network.interfaces import endpoints, interfaces_of, ways_to


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
