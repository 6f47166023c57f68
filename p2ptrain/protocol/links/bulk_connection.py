"""One bulk connection of a link: sends what the link's outbox has for it, and receives frames with a payload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.frame_reader import FrameReader
from p2ptrain.protocol.links.outbox import Outbox
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import Answer, Contribution, Mean, Message
from p2ptrain.protocol.wire.transport import Stream

# After so long without a frame, either side may close a connection. A side that has seen none for REUSE_S sends on
# another one, so that a frame is not lost in a connection that is being closed: the sides' clocks may differ by the
# time that a frame is on its way.
CLOSE_AFTER_S, REUSE_S = 60.0, 45.0
# The rate of a connection is that of so many bytes: more than the buffers of a socket take at once.
RATE_BYTES = 1024 * 1024


class BulkConnection:
    """Serves one connection.

    Args:
        stream: not owned.
        reader: of its frames, which are for bulk connections only.
        outbox: of the link.
        is_chosen: whether this is the connection of the link that sends.
        take: handles a received message with its payload.
        timeout_s: the longest that one frame may take to be sent.

    Attributes:
        used_s: when a frame was last queued or sent, or bytes came.
        rate_bytes_s: bytes per second that it took in the last mebibyte that was sent without a pause; 0 before that.
    """

    def __init__(
        self,
        stream: Stream,
        reader: FrameReader,
        outbox: Outbox,
        is_chosen: Callable[[], bool],
        take: Callable[[frames.Prefix, Message, bytes], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self.used_s = trio.current_time()
        self.rate_bytes_s = 0.0
        self.reader = reader
        self._stream = stream
        self._outbox = outbox
        self._is_chosen = is_chosen
        self._take = take
        self._timeout_s = timeout_s

    @property
    def is_fresh(self) -> bool:
        """Whether it may be sent on."""
        return trio.current_time() < self.used_s + REUSE_S

    async def run(self, lost: trio.Event) -> None:
        """Serve it until the link is lost, or it is not used any more.

        Raises, maybe in a group, PeerLostError if it breaks while it is used, WireError if the peer breaks a rule, and
        what `take` raises.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, nursery.cancel_scope)
                nursery.start_soon(self._write)
                while not lost.is_set() and trio.current_time() < self.used_s + CLOSE_AFTER_S:
                    with trio.move_on_at(self.used_s + CLOSE_AFTER_S):
                        await lost.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.reader.release()

    async def _read(self, whole: trio.CancelScope) -> None:
        while True:
            try:
                prefix, message, payload = await self.reader.frame()
            except PeerLostError:
                if self.is_fresh:
                    raise
                whole.cancel()
                return
            if prefix.bulk or prefix.compressed or not isinstance(message, Answer | Contribution | Mean):
                raise WireError(f"{type(message).__name__} on a bulk connection")
            await trio.lowlevel.cancel_shielded_checkpoint()  # many small frames may be here: others have their turn
            self.used_s = trio.current_time()
            await self._take(prefix, message, payload)

    async def _write(self) -> None:
        began_s, sent_bytes = trio.current_time(), 0
        while True:
            frame = self._outbox.next_bulk_frame() if self._is_chosen() else None
            if frame is None:
                await self._outbox.changed.park()
                began_s, sent_bytes = trio.current_time(), 0
                continue
            with trio.move_on_after(self._timeout_s) as scope:
                await self._stream.send_all(frame)
            if scope.cancelled_caught:
                raise PeerLostError(f"a frame was not sent within {self._timeout_s:.0f} s")
            self.used_s = trio.current_time()
            sent_bytes += len(frame)
            if sent_bytes >= RATE_BYTES and self.used_s > began_s:
                self.rate_bytes_s = sent_bytes / (self.used_s - began_s)
                began_s, sent_bytes = self.used_s, 0
