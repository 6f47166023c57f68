"""A stream over a socket of the event loop: to libp2p's daemon (p2pd), which carries one of libp2p's, or with TLS.

p2pd's connections begin with one message, and raw bytes follow (`control`).

Unlike hivemind's StreamReader, bytes go from the event loop's callback into a bounded buffer that wakes the trio task:
there is no asyncio task per read, and peers get backpressure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network.messages import read_varint

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


class SocketStream:
    """A connection: an asyncio protocol that implements `protocol.wire.transport.Stream`.

    One task may send and one may receive at a time. A cancelled receive loses nothing. The bytes of a cancelled send
    still arrive, unless the stream is closed.

    Attributes:
        remote: the authenticated identity of the peer, base58; "" until it is known.
        relay: the identity of the relay between us; "" if there is none.
        on_lost: called with the socket, in the event loop, when its connection has ended.
    """

    def __init__(
        self, on_message: Callable[[SocketStream, bytes], None] | None = None,
        *, remote: str = "", has_first_message: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            on_message: called once, in the event loop, with p2pd's first message.
            remote: the other end, if it is known.
            has_first_message: whether it is a connection to p2pd, which begins with a message.
        """
        self.remote = remote
        self.relay = ""
        self.on_lost: Callable[[SocketStream], object] = lambda _: None
        self._on_message = on_message
        self._message = None if has_first_message else b""
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._ended = False
        self._broken: str | None = None
        self._has_ended = False
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

    @property
    def has_ended(self) -> bool:
        """Whether the connection is over, so that `on_lost` was called."""
        return self._has_ended

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
        self._has_ended = True
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
