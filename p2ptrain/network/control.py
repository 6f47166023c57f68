"""libp2p streams and control requests over the unix sockets of the libp2p daemon (p2pd).

p2pd speaks length-prefixed protobuf: a client connects, sends a request and gets a response. After a STREAM_OPEN the
same socket carries the stream. For an incoming stream, p2pd connects to our socket, names the peer, and the bytes
follow. In both cases `DaemonSocket` reads one message and then raw bytes.

Unlike hivemind's StreamReader, p2pd's bytes go from the event loop's callback into a bounded buffer that wakes the
trio task: there is no asyncio task per read, and peers get backpressure.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr, PeerID, p2pd_pb2
from p2ptrain.network.addresses import peer_id_bytes
from p2ptrain.network.bridge import from_asyncio
from p2ptrain.network.messages import read_varint, send_message
from p2ptrain.protocol.membership.reachability import relay_of
from p2ptrain.protocol.wire.text import escaped

# Received bytes that are not read yet. At this limit reading stops, which stops p2pd and then the peer.
RECEIVE_BUFFER_BYTES = 512 * 1024
# Bytes that send_all may leave unsent when it returns.
SEND_BUFFER_BYTES = 256 * 1024
# A response from p2pd: a list of 128 peers with all their addresses takes about 40 kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# How long bytes accepted by send_all may take to reach p2pd after aclose.
LINGER_S = 2.0
# p2pd resets the stream when we close our end, and libp2p then drops what the other p2pd has received but not yet
# delivered. So closing waits until the last bytes are this old: about 100 times their delay on an idle machine.
LAST_BYTES_S = 0.25


class DaemonSocket:
    """A connection to p2pd: an asyncio protocol that implements `protocol.wire.transport.Stream`.

    One task may send and one may receive at a time. A cancelled receive loses nothing. The bytes of a cancelled send
    still arrive, unless the stream is closed.

    Attributes:
        remote: the authenticated identity of the peer, base58; "" until it is known.
        relay: the identity of the relay between us; "" if there is none.
        on_lost: called with the socket, in the event loop, when its connection has ended.
    """

    def __init__(self, on_message: Callable[[DaemonSocket, bytes], None] | None = None) -> None:
        """`on_message` is called once, in the event loop, with p2pd's first message."""
        self.remote = ""
        self.relay = ""
        self.on_lost: Callable[[DaemonSocket], object] = lambda _: None
        self._on_message = on_message
        self._message: bytes | None = None
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._ended = False
        self._broken: str | None = None
        self._writable = True
        self._reading = True
        self._sent_s = 0.0
        self._receivers = trio.lowlevel.ParkingLot()
        self._senders = trio.lowlevel.ParkingLot()
        self._transport: asyncio.Transport | None = None

    def identify(self, info: Any) -> None:
        """Take remote and relay from p2pd's StreamInfo."""
        self.remote, self.relay = PeerID(info.peer).to_base58(), relay_of(maddr_text(info.addr))

    # The interface `Stream`.

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._wait_writable()
        assert self._transport is not None
        self._transport.write(data)
        self._sent_s = asyncio.get_running_loop().time()
        await self._wait_writable()

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._chunks:
            if self._broken is not None:
                raise PeerLostError(self._broken)
            if self._ended:
                return b""
            await self._receivers.park()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        self._set_reading(True)
        return data

    async def aclose(self) -> None:
        """Close both directions; bytes accepted by `send_all` are still delivered. May be called twice."""
        if self._broken is None and not self._ended:
            assert self._transport is not None
            self._set_reading(True)
            self._break("the stream was closed on this side")
            # p2pd closes the socket when it has read everything; until then the stream counts as open.
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._sent_s + LAST_BYTES_S), self._end_writing)
            loop.call_later(LINGER_S, self._transport.abort)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def fail(self, reason: str) -> None:
        """Break the stream at once: send and receive raise PeerLostError from now on."""
        if self._broken is None:
            self._break(reason)
        if self._transport is not None:
            self._transport.abort()

    async def first_message(self) -> bytes:
        """Wait for p2pd's first message. Raises PeerLostError when the connection ends first."""
        while self._message is None:
            if self._ended or self._broken is not None:
                raise PeerLostError(self._broken or "the libp2p daemon closed the connection")
            await self._receivers.park()
        return self._message

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._broken is not None:
            return
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._message is None:
            self._take_message()
        if self._buffered_bytes >= RECEIVE_BUFFER_BYTES:
            self._set_reading(False)
        self._receivers.unpark_all()

    def eof_received(self) -> None:
        self._ended = True
        self._receivers.unpark_all()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended:  # else unsent bytes of ours are expected to be lost
            self._break(f"the connection was lost: {error or 'closed'}")
        self._receivers.unpark_all()
        self._senders.unpark_all()
        self.on_lost(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._senders.unpark_all()

    # Inside.

    async def _wait_writable(self) -> None:
        while True:
            if self._broken is not None or self._ended:
                raise PeerLostError(self._broken or "the other end has closed the stream")
            if self._writable:
                return
            await self._senders.park()

    def _take_message(self) -> None:
        data = b"".join(self._chunks)
        size, start = read_varint(data)
        if size > MAX_MESSAGE_BYTES:
            self.fail(f"the libp2p daemon sent a message of {size} bytes")
            return
        if start == 0 or len(data) < start + size:
            self._chunks = [data]
            return
        self._message, rest = data[start : start + size], data[start + size :]
        self._chunks = [rest] if rest else []
        self._buffered_bytes = len(rest)
        if self._on_message is not None:
            self._on_message(self, self._message)

    def _set_reading(self, reading: bool) -> None:
        assert self._transport is not None
        if reading == self._reading or self._ended or self._broken is not None:
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _end_writing(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._receivers.unpark_all()
        self._senders.unpark_all()


async def ask(path: str, request: Any, timeout_s: float) -> Any:
    """Send a `p2pd_pb2.Request` on a new connection, and return the `p2pd_pb2.Response`.

    Raises PeerLostError if p2pd is gone, reports a failure, or does not answer in time.
    """
    response, socket = await _ask(path, request, timeout_s)
    socket.fail("done")
    return response


async def _ask(path: str, request: Any, timeout_s: float) -> tuple[Any, DaemonSocket]:
    """As `ask`; also returns the socket, which carries the stream after a STREAM_OPEN. The caller closes it."""
    loop = asyncio.get_running_loop()
    with trio.move_on_after(timeout_s):
        try:
            _, socket = await from_asyncio(loop.create_unix_connection(DaemonSocket, path))  # type: ignore[type-var]
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


async def open_stream(path: str, peer_id: str, protocol: str, timeout_s: float) -> DaemonSocket:
    """Open a stream to a peer that p2pd is connected to or has an address of. The caller closes it.

    Raises PeerLostError if the peer cannot be reached in time, or does not speak the protocol.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol], timeout=math.ceil(timeout_s))
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    response, stream = await _ask(path, request, timeout_s)
    stream.identify(response.streamInfo)
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
