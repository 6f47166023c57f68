"""Connections that are forwarded along a way, and ways that cannot be taken."""

from __future__ import annotations

import errno
import socket
from unittest.mock import AsyncMock

import pytest
import trio
import trio.testing

from p2ptrain.network.forward import forwarded
from p2ptrain.network.interfaces import Interface, Way, endpoints


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
