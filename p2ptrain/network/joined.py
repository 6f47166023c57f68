"""Two TCP connections joined to one: a connection to another peer, dialled here, which p2pd sees as one it accepted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from p2ptrain.errors import PeerLostError
from p2ptrain.network.socket_stream import LINGER_S
from p2ptrain.network.thread import from_asyncio

Address = tuple[str, int]
"""IPv4 address and TCP port."""


class End(asyncio.Protocol):
    """One of two joined connections: sends on the other one what it receives, and closes it when it ends.

    Before `start` it keeps what it receives, and stops reading.
    """

    transport: asyncio.Transport
    other: asyncio.Transport | None = None
    _early = b""

    def start(self) -> None:
        assert self.other is not None
        if self.transport.is_closing():
            self.other.close()
        else:
            self.transport.resume_reading()
            self.other.write(self._early)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
            self.transport.pause_reading()
        elif not self.other.is_closing():
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()
            asyncio.get_running_loop().call_later(LINGER_S, self.other.abort)


@contextlib.asynccontextmanager
async def joined(listening: Address, outer: Address, port: int | None = None) -> AsyncIterator[End]:
    """Connect to `outer` from `port` (default: the one on which p2pd listens), connect to p2pd, and join the two.

    If the block ends without an error, both last until one of them is closed; otherwise both are aborted. Raises
    PeerLostError.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as unless_done:
        with socket.socket() as dialled, socket.socket() as local:
            try:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as p2pd does
                    dialled.setsockopt(socket.SOL_SOCKET, option, 1)
                dialled.bind(("", port or listening[1]))
                ends = []
                for unconnected, to in ((dialled, outer), (local, listening)):
                    unconnected.setblocking(False)
                    await from_asyncio(loop.sock_connect(unconnected, to))
                    _, end = await from_asyncio(loop.create_connection(End, sock=unconnected.dup()))
                    unless_done.callback(end.transport.abort)
                    ends.append(end)
            except OSError as error:
                raise PeerLostError(f"dialling from port {port or listening[1]}: {error}") from None
        remote, own = ends
        # Before either starts, as the bytes that one writes may make the other pause it.
        remote.other, own.other = own.transport, remote.transport
        for end in ends:
            end.start()
        yield remote
        unless_done.pop_all()
