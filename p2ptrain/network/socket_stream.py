"""A stream over a socket of the event loop, protobuf messages on streams, and services for streams.

The socket leads to libp2p's daemon (p2pd), for one of libp2p's streams, or to another peer, with TLS. p2pd's
connections begin with one message, and raw bytes follow (`daemon`). Messages have a length prefix, as p2pd and libp2p's
protocols frame them, such as circuit relay v2 (`relay`) and AutoNAT (`dial_back`).

Unlike in hivemind's StreamReader, bytes go from the event loop's callback into a bounded buffer that wakes the trio
task: there is no asyncio task per read, and peers get backpressure.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.wire.transport import Stream

logger = logging.getLogger(__name__)

# Limit of received bytes that are not read yet. At this limit reading stops, which stops p2pd and then the peer.
RECEIVE_BUFFER_BYTES = 512 * 1024
# How many bytes may be unsent when send_all returns.
SEND_BUFFER_BYTES = 256 * 1024
# Limit of a response of p2pd: a list of 128 peers with all their addresses takes about 40 kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# No message of libp2p's protocols between two peers is longer.
MAX_FRAME_BYTES = 4096
# How long bytes of send_all may take to reach p2pd after aclose.
LINGER_S = 2.0
# p2pd resets the stream when we close our end, and libp2p then drops bytes that the other p2pd has received and not yet
# delivered. So closing waits until the last bytes are this old: about 100 times their delay on an idle machine.
LAST_BYTES_S = 0.25

AnyMessage = TypeVar("AnyMessage", bound=Message)


def framed(message: Message) -> bytes:
    """A message with its length prefix."""
    body: bytes = message.SerializeToString()
    return varint(len(body)) + body


async def send_message(stream: Stream, message: Message) -> None:
    """Send one message to a peer. Raises PeerLostError."""
    await stream.send_all(framed(message))


async def receive_message(stream: Stream, kind: type[AnyMessage]) -> tuple[AnyMessage, bytes]:
    """Receive one message from a peer. Returns it and the bytes that followed.

    As usual in protobuf, a field of the wrong type counts as missing. Raises PeerLostError if the stream ended or
    broke, or the message is malformed or too large.
    """
    data = b""
    while True:
        size, start = read_varint(data)
        if size > MAX_FRAME_BYTES or (start == 0 and len(data) >= 10):
            raise PeerLostError("malformed message")
        if start and len(data) >= start + size:
            break
        if not (some := await stream.receive_some()):
            raise PeerLostError("the stream ended before the message")
        data += some
    try:
        return kind.FromString(data[start : start + size]), data[start + size :]
    except DecodeError:
        raise PeerLostError("malformed message") from None


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes) -> tuple[int, int]:
    """Decode a varint: its value and size in bytes; (0, 0) while it is incomplete."""
    value = 0
    for index, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return 0, 0


class SocketStream:
    """A connection: an asyncio protocol that implements `protocol.wire.transport.Stream`.

    One task may send and one may receive at a time. A cancelled receive loses nothing. The bytes of a cancelled send
    still arrive, unless the stream is closed.

    Attributes:
        remote: the authenticated identity of the peer, base58; "" until it is known.
        relay: the identity of the relay between us; "" if there is none.
        has_ended: whether the connection is over.
    """

    def __init__(
        self,
        on_message: Callable[[SocketStream, bytes], None] | None = None,
        *,
        among: set[SocketStream] | None = None,
        remote: str = "",
        has_first_message: bool = True,
    ) -> None:
        """
        Args:
            on_message: called once, in the event loop, with p2pd's first message.
            among: the owner's set of connected streams, in which this one is while it is connected.
            remote: the other end, if it is known.
            has_first_message: whether this is a connection to p2pd, which begins with a message.
        """
        self.remote = remote
        self.relay = ""
        self.has_ended = False
        self._among = set() if among is None else among
        self._on_message = on_message
        self._message = None if has_first_message else b""
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
            loop = asyncio.get_running_loop()
            if self._transport.can_write_eof():
                # p2pd closes the socket when it has read everything; until then the stream counts as open.
                loop.call_at(max(loop.time(), self._sent_s + LAST_BYTES_S), self._end_writing)
            else:
                self._transport.close()
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
        self._among.add(self)
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
        if not self._ended:  # else we expect to lose unsent bytes
            self._break(f"the connection was lost: {error or 'closed'}")
        self._receivers.unpark_all()
        self._senders.unpark_all()
        self.has_ended = True
        self._among.discard(self)

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


Handle = Callable[[SocketStream], Awaitable[None]]
"""Serves one stream. May raise PeerLostError or TooSlowError."""


class Service:
    """Handles the streams that other peers open for a protocol, at most `limit` at once. More are refused."""

    def __init__(self, doing: str, limit: int, limit_of_peer: int | None = None) -> None:
        """
        Args:
            doing: what it does, for the log.
            limit_of_peer: how many streams one peer may have; None: all.
        """
        self._doing = doing
        self._limit = limit
        self._limit_of_peer = limit_of_peer or limit
        self._taken = Counter[str]()
        self._errors = ErrorLog(logger)
        self._waiting, self._incoming = trio.open_memory_channel[tuple[SocketStream, Handle]](limit)

    def take(self, stream: SocketStream, handle: Handle) -> None:
        """Have `serve` handle a stream, and close it then. Called in the event loop."""
        if self._taken.total() == self._limit or self._taken[stream.remote] == self._limit_of_peer:
            stream.fail("too many requests at once")
        else:
            self._taken[stream.remote] += 1
            self._waiting.send_nowait((stream, handle))

    async def serve(self) -> None:
        """Handle the streams that are taken, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for stream, handle in self._incoming:
                nursery.start_soon(self._serve_one, stream, handle)

    async def _serve_one(self, stream: SocketStream, handle: Handle) -> None:
        with self._errors.containing(self._doing):
            try:
                await handle(stream)
            except (PeerLostError, trio.TooSlowError) as error:
                reason = str(error) or "no answer in time"
                logger.debug("%s for %s failed: %s", self._doing, stream.remote, reason)
            finally:
                self._taken -= Counter([stream.remote])
                await stream.aclose()
