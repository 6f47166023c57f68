"""Opens and accepts bulk connections: direct connections beside a link, for round chunks, means and state.

A link's stream passes through libp2p's daemon, which multiplexes it with others. Two peers that can dial each other
open a bulk connection for their bulk bytes, and close it after a while without use. It belongs to the link: both Hellos
offer it, and it ends with the link. If none can be opened, bulk bytes take the link's stream.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import trio

from p2ptrain.error_log import ErrorLog, innermost
from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.frame_reader import FrameReader
from p2ptrain.protocol.links.handshake import TRAINER
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Ack
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import BulkTransport, PeerId, Stream

logger = logging.getLogger(__name__)

# Open connections, including those that others opened. A round has at most 64 members.
MAX_CONNECTIONS = 64
# Open connections of one link: each side may open one, and another one when the first was not used for a while.
MAX_PER_LINK = 4
# From the dial to the acceptor's Ack, while bulk bytes wait: five round trips of 0.6 s (guess).
OPEN_TIMEOUT_S = 3.0
# The other side may not have our Hello yet, so a failed dial is repeated once after this long (guess).
REDIAL_AFTER_S = 0.5
# A peer that could not be reached, or whose connection broke, is tried again after this long (guess).
RETRY_S = 600.0
# A peer that ends closes its connections at once. Its Leave may arrive on the link up to this much later (guess).
WAIT_FOR_LEAVE_S = 1.0
# An Ack has no fields.
MAX_ACK_BYTES = 16
# Length of a reason in the log.
MAX_REASON = 200
# Peers whose failed connections are remembered; the oldest is forgotten.
MAX_REMEMBERED = 4096


class BulkConnections:
    """Opens and accepts the bulk connections of a peer's links.

    Args:
        transport: None if no connections are possible.
        live: the peer's links.
        containing: `Links.containing`.
        errors: logs exceptions of our code.

    Attributes:
        count: open connections.
    """

    def __init__(
        self,
        transport: BulkTransport | None,
        live: Mapping[PeerId, Link],
        containing: Callable[[Link, str], AbstractContextManager[None]],
        errors: ErrorLog,
    ) -> None:
        self._errors = errors
        self._transport = transport
        self._live = live
        self._containing = containing
        self._opening: dict[Link, trio.Event] = {}
        # For each peer that was not reached: its offer at that time, and until when it is not dialled again.
        self._retry_s: dict[PeerId, tuple[bytes, float]] = {}
        self.count = 0
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Accept connections until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                while self._transport is not None:
                    self._nursery.start_soon(self._welcome, await self._transport.accept())
        finally:
            self._nursery = None

    def begin(self, link: Link) -> None:
        """A link begins: accept connections of its peer, if that trains. Raises WireError if its Hello is malformed."""
        if self._transport is not None and link.hello.role == TRAINER:
            if self._retry_s.get(link.peer_id, (b"", 0.0))[0] != link.hello.bulk:
                self._retry_s.pop(link.peer_id, None)  # it was restarted
            self._transport.admit(link.peer_id, link.hello.bulk)

    def end(self, link: Link) -> None:
        """A link has ended."""
        if self._transport is not None:
            self._transport.admit(link.peer_id, b"")

    def open_soon(self, links: Iterable[Link]) -> None:
        """Start to open connections to these peers, as bulk bytes will be exchanged with them soon."""
        for link in links:
            self._start(link)

    async def opened(self, link: Link) -> None:
        """Open a connection for a link, if it has none and one is possible. Takes at most 3 s."""
        if (opening := self._start(link)) is None:
            return
        async with trio.open_nursery() as nursery:

            async def end_with_link() -> None:
                await link.lost.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_with_link)
            await opening.wait()
            nursery.cancel_scope.cancel()

    def is_impossible(self, link: Link) -> bool:
        """Whether the link has no connection and gets none: a side offers none, or a dial failed not long ago."""
        return not link.has_bulk_connection and (not self._both_offer(link) or self._is_refused(link.peer_id))

    def _both_offer(self, link: Link) -> bool:
        return self._transport is not None and bool(self._transport.offer and link.hello.bulk)

    def _is_refused(self, peer_id: PeerId) -> bool:
        return trio.current_time() < self._retry_s.get(peer_id, (b"", -math.inf))[1]

    def _start(self, link: Link) -> trio.Event | None:
        """Start to open a connection, if one is needed and possible. The event is set when that attempt ends."""
        if link in self._opening or link.has_bulk_connection or link.lost.is_set():
            return self._opening.get(link)
        transport, nursery = self._transport, self._nursery
        if transport is None or nursery is None or not self._both_offer(link):
            return None
        if self.count + len(self._opening) >= MAX_CONNECTIONS or self._is_refused(link.peer_id):
            return None
        ended = self._opening[link] = trio.Event()
        nursery.start_soon(self._open, transport, nursery, link)
        return ended

    async def _open(self, transport: BulkTransport, nursery: trio.Nursery, link: Link) -> None:
        try:
            with trio.move_on_after(OPEN_TIMEOUT_S):
                try:
                    stream, reader = await self._dial(transport, link)
                except PeerLostError:
                    await trio.sleep(REDIAL_AFTER_S)
                    stream, reader = await self._dial(transport, link)
                await nursery.start(self._serve, link, stream, reader.read_ahead)
                return
            self._note_failed(link, f"timeout: no connection within {OPEN_TIMEOUT_S:g} s")
        except PeerLostError as error:
            self._note_failed(link, str(error))
        except Exception as error:
            self._errors.note(f"opening a bulk connection with {link.peer_id}", error)
            self._note_failed(link, repr(error))
        finally:
            self._opening.pop(link).set()

    async def _dial(self, transport: BulkTransport, link: Link) -> tuple[Stream, FrameReader]:
        """Open a connection, and wait until the other side has accepted it. Raises PeerLostError."""
        stream = await transport.open(link.peer_id, link.hello.bulk, link.hello.maddrs)
        try:
            reader = FrameReader(stream, max_body_bytes=MAX_ACK_BYTES)
            await reader.frame()
        except BaseException as error:
            await stream.aclose()
            if isinstance(error, WireError):
                raise PeerLostError(f"no Ack: {error}") from None
            raise
        return stream, reader

    async def _welcome(self, stream: Stream) -> None:
        link = self._live.get(stream.remote)
        if link is None or link.num_bulk_connections >= MAX_PER_LINK or self.count >= MAX_CONNECTIONS:
            await stream.aclose()
            return
        try:
            with self._containing(link, "accepting its bulk connection"):
                await stream.send_all(encode_frame(Ack()))
                await self._serve(link, stream, b"")
        finally:
            await stream.aclose()

    async def _serve(
        self,
        link: Link,
        stream: Stream,
        read_ahead: bytes,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        why = ""
        with self._containing(link, "serving its bulk connection"):
            self.count += 1
            try:
                await link.run_bulk(stream, read_ahead, task_status=task_status)
            except* PeerLostError as errors:
                why = str(innermost(errors))
            finally:
                self.count -= 1
                await stream.aclose()
        if why:
            await self._end_broken(link, why)

    async def _end_broken(self, link: Link, why: str) -> None:
        """Close the link, as frames may be lost. First wait a moment for its stream to say why: a Leave may come."""
        with trio.move_on_after(WAIT_FOR_LEAVE_S):
            await link.lost.wait()
            return
        self._note_failed(link, why)
        link.close(f"its direct connection broke: {why}")

    def _note_failed(self, link: Link, why: str) -> None:
        if link.lost.is_set() or link.has_bulk_connection:
            return  # the link has ended, or the other side has opened one meanwhile
        told = logging.DEBUG if self._retry_s.pop(link.peer_id, None) else logging.INFO
        logger.log(
            told,
            "no direct connection with %s: libp2p carries rounds and state (%s)",
            link.peer_id,
            shown(why, MAX_REASON),
        )
        self._retry_s[link.peer_id] = link.hello.bulk, trio.current_time() + RETRY_S
        if len(self._retry_s) > MAX_REMEMBERED:
            del self._retry_s[next(iter(self._retry_s))]
