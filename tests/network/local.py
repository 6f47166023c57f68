"""Real peers on 127.0.0.1, and the processes behind them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network.host import Network, open_network
from p2ptrain.protocol.wire.transport import Stream
from p2ptrain.settings.peer_config import NetworkConfig


def config(*initial: Network, **settings: Any) -> NetworkConfig:
    """A peer on loopback whose initial peers are the given ones."""
    maddrs = tuple(maddr for network in initial for maddr in network.maddrs)
    return NetworkConfig(**{"host_maddrs": ("/ip4/127.0.0.1/tcp/0",), "initial_peers": maddrs, **settings})


@contextlib.asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[Network, Network]]:
    async with open_network(config()) as first, open_network(config(first)) as second:
        yield first, second


async def keep_open(
    config: NetworkConfig, task_status: trio.TaskStatus[tuple[Network, Callable[[], Awaitable[None]]]]
) -> None:
    """For `nursery.start`: a network with its own lifetime, and a function that closes it."""
    close, closed = trio.Event(), trio.Event()

    async def aclose() -> None:
        close.set()
        await closed.wait()

    async with open_network(config) as network:
        task_status.started((network, aclose))
        await close.wait()
    closed.set()


@contextlib.asynccontextmanager
async def open_streams() -> AsyncIterator[tuple[Stream, Stream, Network, Network]]:
    """Both ends of one stream, with the networks of the opening and the accepting peer."""
    async with open_pair() as (first, second):
        ours = await first.transport.open_stream(second.peer_id, second.maddrs)
        await ours.send_all(b"hello")
        theirs = await second.transport.accept()
        assert await read(theirs, 5) == b"hello"
        yield ours, theirs, first, second


@contextlib.asynccontextmanager
async def two_listening() -> AsyncIterator[tuple[Any, Any]]:
    """Two listening sockets that let others use their ports, as p2pd does: ours, and the other peer's."""
    with trio.socket.socket() as p2pd, trio.socket.socket() as far:
        for listening in (p2pd, far):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await listening.bind(("127.0.0.1", 0))
            listening.listen()
        yield p2pd, far


async def end_of(connection: Any) -> bytes:
    """All bytes until the end or the reset of a connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await connection.recv(65536):
            received += data
    connection.close()
    return received


class Given:
    """A stream that delivers bytes one by one, and then ends."""

    def __init__(self, data: bytes) -> None:
        self.sent = b""
        self._data = deque(data)

    async def receive_some(self) -> bytes:
        return bytes([self._data.popleft()]) if self._data else b""

    async def send_all(self, data: bytes) -> None:
        self.sent += data


async def read(stream: Stream, size: int) -> bytes:
    """Exactly `size` bytes. Raises PeerLostError when the stream ends before."""
    data = bytearray()
    while len(data) < size:
        some = await stream.receive_some()
        if not some:
            raise PeerLostError(f"ended after {len(data)} of {size} bytes")
        data += some
    assert len(data) == size
    return bytes(data)


def daemons_of(pid: int) -> list[int]:
    """The pids of the p2pd processes that a process has started."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat=,comm="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in found.stdout.splitlines()]
    return [
        int(child) for child, parent, stat, name in rows if int(parent) == pid and name == "p2pd" and stat[0] != "Z"
    ]


def is_running(pid: int) -> bool:
    """Whether a process is alive; a zombie is not alive."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] not in ("", "Z")
