"""libp2p streams and control requests over the unix sockets of the libp2p daemon (p2pd).

p2pd speaks length-prefixed protobuf: a client connects, sends a request and gets a response. After a STREAM_OPEN the
same socket carries the stream. For an incoming stream, p2pd connects to our socket, names the peer, and the bytes
follow. In both cases a `SocketStream` reads one message and then raw bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr, PeerID, p2pd_pb2
from p2ptrain.network.addresses import peer_id_bytes
from p2ptrain.network.socket_stream import SocketStream, send_message
from p2ptrain.network.thread import from_asyncio
from p2ptrain.protocol.membership.reachability import relay_of
from p2ptrain.protocol.wire.text import escaped


def identify(stream: SocketStream, info: Any) -> None:
    """Write remote and relay of p2pd's StreamInfo into a stream."""
    stream.remote, stream.relay = PeerID(info.peer).to_base58(), relay_of(maddr_text(info.addr))


async def ask(path: str, request: Any, timeout_s: float) -> Any:
    """Send a `p2pd_pb2.Request` on a new connection, and return the `p2pd_pb2.Response`.

    Raises PeerLostError if p2pd is gone, reports a failure, or does not answer in time.
    """
    response, socket = await _ask(path, request, timeout_s)
    socket.fail("done")
    return response


async def _ask(
    path: str, request: Any, timeout_s: float, among: set[SocketStream] | None = None
) -> tuple[Any, SocketStream]:
    """As `ask`; also returns the socket, which carries the stream after a STREAM_OPEN. The caller closes it."""
    loop = asyncio.get_running_loop()
    with trio.move_on_after(timeout_s):
        try:
            connecting = loop.create_unix_connection(lambda: SocketStream(among=among), path)  # type: ignore[type-var]
            _, socket = await from_asyncio(connecting)
        except OSError as error:
            raise PeerLostError(f"the libp2p daemon does not answer: {error}") from None
        try:
            await send_message(socket, request)
            response = p2pd_pb2.Response.FromString(await socket.first_message())
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerLostError(escaped(response.error.msg))
        except BaseException:
            socket.fail("the request failed")
            raise
        return response, socket
    raise PeerLostError(f"timeout: no answer within {timeout_s:g} s")


async def open_stream(
    path: str, peer_id: str, protocol: str, timeout_s: float, *, among: set[SocketStream] | None = None
) -> SocketStream:
    """Open a stream to a peer that p2pd is connected to or has an address of. The caller closes it.

    `among`: as of `SocketStream`.

    Raises PeerLostError if the peer cannot be reached in time, or does not speak the protocol.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol], timeout=math.ceil(timeout_s))
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    response, stream = await _ask(path, request, timeout_s, among)
    identify(stream, response.streamInfo)
    return stream


async def connections(path: str, timeout_s: float) -> list[tuple[str, str]]:
    """All connections of p2pd: peer ids, and the multiaddrs of the other ends. Raises PeerLostError.

    The multiaddr is empty if hivemind's parser does not know its type.
    """
    response = await ask(path, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), timeout_s)
    return [(PeerID(info.id).to_base58(), maddr_text(info.addrs[0])) for info in response.peers]


class Connections:
    """The connections of p2pd, listed once for all who ask within a while. Listing takes half a millisecond."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._listed_s = -math.inf
        self._found: list[tuple[str, str]] = []
        self._lock = trio.Lock()

    async def listed(self, most_s: float) -> list[tuple[str, str]]:
        """As `connections`, from a list that is at most so old. Raises PeerLostError."""
        asked_s = trio.current_time()
        async with self._lock:
            if asked_s - self._listed_s > most_s:
                began_s = trio.current_time()
                self._found = await connections(self._path, self._timeout_s)
                self._listed_s = began_s
            return self._found


def maddr_text(maddr: bytes) -> str:
    """A multiaddr of p2pd as text; empty if hivemind's parser does not know its type."""
    with contextlib.suppress(Exception):  # it raises many types
        return str(Multiaddr(maddr))
    return ""
