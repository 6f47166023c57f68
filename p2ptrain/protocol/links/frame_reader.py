"""Cuts a stream of bytes into frames, within bounds of size, time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.receive_budget import ReceiveBudget, Share
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import Message
from p2ptrain.protocol.wire.transport import Stream

# Smaller bodies are not counted: heartbeats come through when the budget is spent. Two streams of 128 links: 16 MiB.
UNCOUNTED_BYTES = 64 * 1024


class FrameReader:
    """Reads the frames of one stream; every size is checked before the bytes behind it are awaited.

    A large frame holds a share of the budget from before its body is awaited until the next frame is asked for.

    Args:
        stream: what is read; not owned.
        read_ahead: bytes that were received before.
        on_bytes: called whenever anything arrives, also in the middle of a long frame.
        budget: what large frames take a share of; None: nothing is counted.
        frame_timeout_s: seconds that one frame may take from its first byte to its last.
        max_body_bytes: of every frame.

    Attributes:
        held_up: whether it waits for its share of the budget, and so reads nothing.
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
        self._stream = stream
        self._buffer = bytearray(read_ahead)
        self._on_bytes = on_bytes
        self._budget = budget
        self._frame_timeout_s = frame_timeout_s
        self._max_body_bytes = max_body_bytes
        self._share: Share | None = None

    async def frame(self) -> tuple[frames.Prefix, Message, bytes]:
        """The next frame. Raises WireError, and PeerLostError at the end of the stream, clean or not."""
        self.release()
        if not self._buffer:
            await self._receive()
        if len(self._buffer) < frames.PREFIX_BYTES:
            await self._fill_in_time(frames.PREFIX_BYTES, trio.CancelScope())
        prefix = frames.decode_prefix(self._take(frames.PREFIX_BYTES))
        size = prefix.body_bytes
        if size > self._max_body_bytes:
            raise WireError(f"frame of {size} bytes, at most {self._max_body_bytes} here")
        if self._budget is not None and size > UNCOUNTED_BYTES:
            share = await self._take_share(self._budget, size)
            if len(self._buffer) < size:
                assert share.receiving is not None
                await self._fill_in_time(size, share.receiving)
            share.receiving = None
        elif len(self._buffer) < size:
            await self._fill_in_time(size, trio.CancelScope())
        message, payload = frames.decode_body(prefix, self._take(size))
        return prefix, message, payload

    def release(self) -> None:
        """The last frame has been handled, or given up: its bytes no longer count. May be called twice."""
        if self._share is not None and self._budget is not None:
            self._budget.release(self._share)
            self._share = None

    @property
    def read_ahead(self) -> bytes:
        """What was received behind the last frame, for the next reader of this stream."""
        return bytes(self._buffer)

    async def _take_share(self, budget: ReceiveBudget, size: int) -> Share:
        self.held_up = True
        try:
            self._share = await budget.take(size)
        finally:
            self.held_up = False
            self._on_bytes()  # not the partner was silent: we did not listen
        return self._share

    async def _fill_in_time(self, size: int, scope: trio.CancelScope) -> None:
        began_s = trio.current_time()
        scope.deadline = began_s + self._frame_timeout_s
        with scope:
            while len(self._buffer) < size:
                await self._receive()
        if len(self._buffer) < size:
            raise PeerLostError(f"a frame of it was not complete after {trio.current_time() - began_s:.0f} s")

    async def _receive(self) -> None:
        data = await self._stream.receive_some()
        if not data:
            raise PeerLostError("it closed the connection")
        self._on_bytes()
        self._buffer += data

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken
