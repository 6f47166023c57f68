"""Reads frames from a stream, with limits on size, time and memory.

All links of a peer together hold a bounded number of bytes of received frames, compressed and decompressed. Each large
frame takes a share of this budget, first come, first served. While a reader waits for its share, the oldest incomplete
frame is cancelled after `GIVE_UP_AFTER_S` and its link closed. So a sender that never completes its frame cannot keep
its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import Stream

# Sixteen frames of the largest size, or 512 chunks of a round (guess).
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
# How long a frame may stay incomplete while others wait (guess). 4 MiB take this long at 11 Mbit/s. 128 streams that
# never complete their frames are all closed within 30 s, after which a peer gives up.
GIVE_UP_AFTER_S = 3.0
# Smaller bodies bypass the budget, so that heartbeats pass when it is used up. Two streams of 256 links and 64 bulk
# connections: 36 MiB.
UNCOUNTED_BYTES = 64 * 1024


class Share:
    """Bytes of the budget that one frame holds. `receiving` cancels an incomplete frame; None if it is complete."""

    def __init__(self, size_bytes: int, since_s: float) -> None:
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.receiving: trio.CancelScope | None = trio.CancelScope()


class ReceiveBudget:
    """Bytes that the received frames of all links of a peer may hold."""

    def __init__(self, limit_bytes: int = MAX_RECEIVE_BYTES) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._shares: dict[Share, None] = {}  # oldest first
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    async def take(self, size_bytes: int) -> Share:
        """Wait until these bytes fit, and take them. One frame always fits. The caller must `release` the share."""
        if self._turn.locked() or not self._fits(size_bytes):
            async with self._turn:
                while not self._fits(size_bytes):
                    freed = self._freed = trio.Event()
                    with trio.move_on_at(self._give_up_oldest()):
                        await freed.wait()
        # Leaving a trio lock does not yield, so no other task has taken the room since.
        share = Share(size_bytes, trio.current_time())
        self._shares[share] = None
        self.held_bytes += size_bytes
        return share

    def release(self, share: Share) -> None:
        """Return a share."""
        del self._shares[share]
        self.held_bytes -= share.size_bytes
        self._freed.set()

    def _fits(self, size_bytes: int) -> bool:
        return not self._shares or self.held_bytes + size_bytes <= self._limit_bytes

    def _give_up_oldest(self) -> float:
        """Cancel the oldest incomplete frame if it is old enough. Returns when to check again."""
        now = trio.current_time()
        for share in self._shares:
            if share.receiving is not None and not share.receiving.cancel_called:
                if now < share.since_s + GIVE_UP_AFTER_S:
                    return share.since_s + GIVE_UP_AFTER_S
                share.receiving.cancel()
                break
        return now + GIVE_UP_AFTER_S


class FrameReader:
    """Reads the frames of one stream; sizes are checked before the bytes are awaited.

    A frame that is large, or becomes large when decompressed, holds a share of the budget from before its body is read
    until the next call of `frame`.

    Args:
        stream: not owned.
        read_ahead: bytes already received.
        on_bytes: called whenever bytes arrive, also within a frame.
        budget: limits large frames; None: no limit.
        frame_timeout_s: seconds from the first byte of a frame to its last.

    Attributes:
        held_up: whether it waits for its share of the budget and reads nothing.
        frame_s: how long the last frame took to arrive, from its first byte to its last.
    """

    def __init__(
        self,
        stream: Stream,
        read_ahead: bytes = b"",
        on_bytes: Callable[[], None] = lambda: None,
        *,
        budget: ReceiveBudget | None = None,
        frame_timeout_s: float = math.inf,
        max_body_bytes: int = frames.MAX_HEADER_BYTES + frames.MAX_PAYLOAD_BYTES,
    ) -> None:
        self.held_up = False
        self.frame_s = 0.0
        self._stream = stream
        self._buffer = bytearray(read_ahead)
        self._on_bytes = on_bytes
        self._budget = budget
        self._frame_timeout_s = frame_timeout_s
        self._max_body_bytes = max_body_bytes
        self._share: Share | None = None

    async def frame(self) -> tuple[frames.Prefix, Message, bytes]:
        """The next frame. Raises WireError, or PeerLostError at the end of the stream."""
        self.release()
        if not self._buffer:
            await self._receive()
        began_s = trio.current_time()
        if len(self._buffer) < frames.PREFIX_BYTES:
            await self._fill_in_time(frames.PREFIX_BYTES, trio.CancelScope())
        prefix = frames.decode_prefix(bytes(self._buffer[: frames.PREFIX_BYTES]))
        del self._buffer[: frames.PREFIX_BYTES]
        size = prefix.body_bytes
        if size > self._max_body_bytes:
            raise WireError(f"frame of {size} bytes, at most {self._max_body_bytes} here")
        held_bytes = size + (prefix.raw_payload_bytes if prefix.compressed else 0)
        if self._budget is not None and held_bytes > UNCOUNTED_BYTES:
            share = await self._take_share(self._budget, held_bytes)
            if len(self._buffer) < size:
                assert share.receiving is not None
                await self._fill_in_time(size, share.receiving)
            share.receiving = None
        elif len(self._buffer) < size:
            await self._fill_in_time(size, trio.CancelScope())
        self.frame_s = trio.current_time() - began_s
        with memoryview(self._buffer)[:size] as body:
            message, payload = frames.decode_body(prefix, body)
        del self._buffer[:size]
        return prefix, message, payload

    def release(self) -> None:
        """Return the last frame's share of the budget. May be called twice."""
        if self._share is not None and self._budget is not None:
            self._budget.release(self._share)
            self._share = None

    @property
    def read_ahead(self) -> bytes:
        """Bytes received after the last frame, for the next reader of this stream."""
        return bytes(self._buffer)

    async def _take_share(self, budget: ReceiveBudget, size: int) -> Share:
        self.held_up = True
        try:
            self._share = await budget.take(size)
        finally:
            self.held_up = False
            self._on_bytes()  # the peer was not silent: we did not read
        return self._share

    async def _fill_in_time(self, size: int, scope: trio.CancelScope) -> None:
        began_s = trio.current_time()
        scope.deadline = began_s + self._frame_timeout_s
        with scope:
            while len(self._buffer) < size:
                await self._receive()
        if len(self._buffer) < size:
            raise PeerLostError(f"its frame was not complete after {trio.current_time() - began_s:.0f} s")

    async def _receive(self) -> None:
        data = await self._stream.receive_some()
        if not data:
            raise PeerLostError("it closed the connection")
        self._on_bytes()
        self._buffer += data
