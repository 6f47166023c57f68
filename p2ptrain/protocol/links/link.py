"""A link to one peer: messages in frames, with priorities, flow control and heartbeats.

The transport shares one connection per pair of peers and buffers megabytes, so on a saturated path a heartbeat would
wait behind them. Hence our own flow control (`flow_control`). Control frames are sent before round chunks, and round
chunks before fragments (`outbox`). Fragments that would arrive too late are dropped.

A link has one stream, or two if both sides dialled at once. `bulk` may open bulk connections beside it, which carry the
bulk frames of the same outbox.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.flow_control import FlowControl
from p2ptrain.protocol.links.frame_reader import FrameReader, ReceiveBudget
from p2ptrain.protocol.links.limits import MessageRates
from p2ptrain.protocol.links.outbox import LinkCounters, Outbox, Traffic, traffic_of
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import (
    Ack,
    Answer,
    Beat,
    Contribution,
    Fragment,
    Hello,
    Leave,
    Mean,
    Message,
    PairWeights,
)
from p2ptrain.protocol.wire.transport import PeerId, Stream
from p2ptrain.settings.peer_config import NetworkConfig

# Intervals between received Beats that are remembered, one per second.
BEATS_REMEMBERED = 60
# The default of a setting: seconds until a silent peer is lost, until unacknowledged bulk bytes mean a dead path
# (whatever the heartbeat shows), and the longest time in which a frame may arrive.
PEER_TIMEOUT_S = NetworkConfig.peer_timeout_s
# A peer with many links sends Beats more rarely, but at least this often. The time between two at most doubles, or
# grows a bit more by rounding to whole seconds. So a peer is lost after at least 3 times the longest recent interval.
MAX_BEAT_EVERY_S, BEATS_APART = 8.0, 3.0
# A killed peer's stream breaks at once. To detect frozen and disconnected peers, a peer is lost after several times the
# longest recent interval between Beats, which come every second. At least ten seconds, as a quiet link says nothing
# about a full one: the windows of eight links fill an uplink of 2 Mbit/s for four seconds.
MISSED_BEATS = 5
MIN_PATIENCE_S = 10.0
# A link counts as in use for this long after a request or an answer: another one may follow (guess).
IN_USE_S = 5.0
# A bulk connection is opened for a payload of at least this size: a smaller one takes less than its handshake (guess).
BULK_FROM_BYTES = 16 * 1024
# Either side may close a bulk connection after this long without a frame. After REUSE_S a side sends on another one, so
# that no frame is lost in a connection that the other side closes: a frame takes time to arrive.
CLOSE_AFTER_S, REUSE_S = 60.0, 45.0
# The rate of a bulk connection is measured over this many bytes: more than the buffers of a socket take at once.
RATE_BYTES = 1024 * 1024
# A closed link still has this long to send its queued frames, often a Leave.
LAST_WORDS_S = 0.2

Handler = Callable[["Link", Message, bytes], Awaitable[None]]


@dataclass(frozen=True)
class LinkSetup:
    """Shared by all links of one peer.

    Attributes:
        handler: called for each message. The link reads on when it returns.
        open_bulk: tries to open a bulk connection for a link, and returns when it has one or gets none.
    """

    handler: Handler
    counters: LinkCounters = field(default_factory=LinkCounters)
    budget: ReceiveBudget = field(default_factory=ReceiveBudget)
    open_bulk: Callable[[Link], Awaitable[None]] | None = None
    peer_timeout_s: float = PEER_TIMEOUT_S


@dataclass(slots=True, eq=False)
class _BulkConnection:
    """A bulk connection of a link.

    Attributes:
        used_s: when a frame was last queued or sent, or bytes arrived.
        rate_bytes_s: the rate of the last mebibyte that was sent without a pause; 0 before that.
    """

    reader: FrameReader
    used_s: float
    rate_bytes_s: float = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether we may send on it."""
        return trio.current_time() < self.used_s + REUSE_S


class Link:
    """A live peer. `Links` creates it after both sides have sent Hello. Once `lost` is set, it stays closed.

    Attributes:
        beat: the peer's last heartbeat, without the members that it named; None before the first.
        lost_reason: why the link is lost; "" while it is not.
        left: whether the peer has sent Leave.
        streams: how many streams the link has had.
        flow: the flow control of its stream.
        rates: the limits on the peer's messages.
        frame_s: how long the frame that is handled took to arrive, from its first byte to its last.
        opened_s, last_heard: when the link began, and when bytes last arrived.
        answered_s: when the peer last answered a request of ours.
        joining_until_s: until when rounds may wait for the peer's next request for our state.
        times_overtaken: how many rounds in a row came before the peer had that state, as it reports.
        beat_sent_s, beat_gap_s: when we sent our last Beat, and the interval planned before it.
    """

    def __init__(self, peer_id: PeerId, hello: Hello, setup: LinkSetup, rates: MessageRates) -> None:
        self.peer_id = peer_id
        self.hello = hello
        self.beat: Beat | None = None
        self.lost = trio.Event()
        self.lost_reason = ""
        self.left = False
        self.streams = 0
        self.flow = FlowControl()
        self.frame_s = 0.0
        self.answered_s = 0.0
        self.joining_until_s, self.times_overtaken = -math.inf, 0
        self.opened_s = self.last_heard = trio.current_time()
        self.rates = rates
        self.beat_sent_s, self.beat_gap_s = -math.inf, 1.0
        self._uses, self._used_s = 0, -math.inf
        self._setup = setup

        self._waits: deque[float] = deque(maxlen=BEATS_REMEMBERED)
        self._beat_heard_at = 0.0
        self._readers: list[FrameReader] = []
        self._handling = 0
        self._bulk: list[_BulkConnection] = []
        self._bulk_rate = 0.0  # of the last one that ended
        self._outbox = Outbox(peer_id, self.flow, setup.counters, rates)

    def send(self, message: Message) -> None:
        """Queue a control frame, which is sent before all other kinds. Does nothing if the link is lost."""
        if self.lost.is_set():
            return
        if not self._outbox.add_control(message):
            self.close("it takes no frames any more")

    async def send_bulk(
        self, message: Message, payload: bytes | memoryview, traffic: Traffic, *, compress: bool = False
    ) -> None:
        """Queue one chunk, after a bulk connection was tried (at most 3 s) and the queue has room.

        Raises PeerLostError.
        """
        if not isinstance(message, PairWeights):  # which keep to the stream
            if len(payload) >= BULK_FROM_BYTES and self._setup.open_bulk is not None:
                await self._setup.open_bulk(self)
            if (connection := self._chosen) is not None:
                connection.used_s = trio.current_time()
        await self._outbox.add_bulk(message, payload, traffic, compress=compress)

    def send_fragment(self, make: Callable[[], Fragment], payload: bytes, *, until_s: float = math.inf) -> None:
        """Queue a fragment that is useful until `until_s`; drops the oldest queued one if there is no room."""
        if not self.lost.is_set():
            self._outbox.add_fragment(make, payload, until_s)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the block runs, we or the peer need the link, so it is not ended as one too many."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._used_s = trio.current_time()

    @property
    def is_in_use(self) -> bool:
        """Whether the link is in use, or was a few seconds ago, or round chunks or state wait to be sent."""
        return self._uses > 0 or self._outbox.has_bulk or trio.current_time() < self._used_s + IN_USE_S

    def close(self, reason: str) -> None:
        """Mark the link lost. Tasks of `run_stream` then end and close their streams."""
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()
            self._outbox.close(reason)

    async def run_stream(self, stream: Stream, read_ahead: bytes) -> None:
        """Serve one stream until the link is lost. Frames are sent on the first stream only.

        Raises, in a group, WireError if the peer broke a rule, and any exception of the handler, with the link closed.
        """
        first = not self._readers
        reader = self._reader(stream, read_ahead, self._note_heard)
        self._readers.append(reader)
        all_written = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, reader)
                if first:
                    nursery.start_soon(self._write, stream, all_written)
                else:
                    all_written.set()
                await self.lost.wait()
                with trio.move_on_after(LAST_WORDS_S):
                    await all_written.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close("its stream was closed")
            reader.release()
            await stream.aclose()

    @property
    def rate_bytes_s(self) -> float:
        """Bulk bytes per second that reach the peer; 0 if unknown."""
        return max(self.flow.rate_bytes_s, self._bulk_rate, *(connection.rate_bytes_s for connection in self._bulk))

    @property
    def num_bulk_connections(self) -> int:
        return len(self._bulk)

    @property
    def has_bulk_connection(self) -> bool:
        """Whether bulk frames are sent on a bulk connection."""
        return self._chosen is not None

    @property
    def _chosen(self) -> _BulkConnection | None:
        """The bulk connection that sends."""
        return next((connection for connection in self._bulk if connection.is_fresh), None)

    async def run_bulk(
        self, stream: Stream, read_ahead: bytes, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve a bulk connection until the link is lost, or it has not been used for a while. Leaves the stream open.

        Raises, maybe in a group, PeerLostError if the connection breaks while it is used, WireError if the peer breaks
        a rule, and any exception of the handler.
        """

        def on_bytes() -> None:
            connection.used_s = self.last_heard = trio.current_time()

        reader = self._reader(stream, read_ahead, on_bytes)
        connection = _BulkConnection(reader, trio.current_time())
        self._bulk.append(connection)
        self._outbox.changed.unpark_all()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_bulk, connection, nursery.cancel_scope)
                nursery.start_soon(self._write_bulk, connection, stream)
                while not self.lost.is_set() and trio.current_time() < connection.used_s + CLOSE_AFTER_S:
                    with trio.move_on_at(connection.used_s + CLOSE_AFTER_S):
                        await self.lost.wait()
                nursery.cancel_scope.cancel()
        finally:
            reader.release()
            self._bulk.remove(connection)
            self._bulk_rate = connection.rate_bytes_s or self._bulk_rate
            self._outbox.changed.unpark_all()

    def _reader(self, stream: Stream, read_ahead: bytes, on_bytes: Callable[[], None]) -> FrameReader:
        budget, timeout_s = self._setup.budget, self._setup.peer_timeout_s
        return FrameReader(stream, read_ahead, on_bytes, budget=budget, frame_timeout_s=timeout_s)

    async def _write(self, stream: Stream, all_written: trio.Event) -> None:
        try:
            while True:
                frame = self._outbox.next_frame(has_bulk_connection=self.has_bulk_connection)
                if frame is None:
                    if self.lost.is_set():
                        return
                    await self._outbox.changed.park()
                    continue
                await stream.send_all(frame)
        except PeerLostError as error:
            self.close(str(error))
        except Exception as error:
            self.close(f"internal error while making a frame: {error!r}")
            raise
        finally:
            all_written.set()

    async def _read(self, reader: FrameReader) -> None:
        kind = "a frame"
        try:
            while True:
                prefix, message, payload = await reader.frame()
                kind, self.frame_s = type(message).__name__, reader.frame_s
                await self._take(prefix, message, payload)
                if self.left:
                    self.close("it left the run")
        except PeerLostError as error:
            self.close(str(error))
        except WireError as error:
            self.close(f"it broke the protocol: {error}")
            raise
        except Exception as error:
            error.add_note(f"while {kind} of {self.peer_id} was handled")
            self.close(f"internal error while handling {kind}: {error!r}")
            raise

    async def _take(self, prefix: frames.Prefix, message: Message, payload: bytes) -> None:
        if payload and not isinstance(message, Answer | Contribution | Fragment | Mean | PairWeights):
            raise WireError(f"{type(message).__name__} with a payload")
        size, acked_before = frames.PREFIX_BYTES + prefix.body_bytes, self.flow.acked
        if self.flow.note_acked(prefix.acked_bytes, trio.current_time()):
            self._outbox.note_acked()
        self.rates.check(message, size, self.flow.acked - acked_before, trio.current_time())
        if prefix.bulk and self.flow.note_received(size):
            self.send(Ack())
        if isinstance(message, Beat):
            self._note_beat(message)
        elif isinstance(message, Leave):
            self.left = True
        await self._handle(message, payload, size)

    async def _read_bulk(self, connection: _BulkConnection, whole: trio.CancelScope) -> None:
        while True:
            try:
                prefix, message, payload = await connection.reader.frame()
            except PeerLostError:
                if connection.is_fresh:
                    raise
                whole.cancel()
                return
            if prefix.bulk or prefix.compressed or not isinstance(message, Answer | Contribution | Mean):
                raise WireError(f"{type(message).__name__} on a bulk connection")
            await trio.lowlevel.cancel_shielded_checkpoint()  # many small frames may be here: others have their turn
            connection.used_s = trio.current_time()
            # The network's flow control suffices here.
            size = frames.PREFIX_BYTES + prefix.body_bytes
            self.rates.check(message, size, 0, trio.current_time())
            await self._handle(message, payload, size)

    async def _write_bulk(self, connection: _BulkConnection, stream: Stream) -> None:
        timeout_s = self._setup.peer_timeout_s
        began_s, sent_bytes = trio.current_time(), 0
        while True:
            frame = self._outbox.next_bulk_frame() if self._chosen is connection else None
            if frame is None:
                await self._outbox.changed.park()
                began_s, sent_bytes = trio.current_time(), 0
                continue
            with trio.move_on_after(timeout_s) as scope:
                await stream.send_all(frame)
            if scope.cancelled_caught:
                raise PeerLostError(f"a frame was not sent within {timeout_s:.0f} s")
            connection.used_s = trio.current_time()
            sent_bytes += len(frame)
            if sent_bytes >= RATE_BYTES and connection.used_s > began_s:
                connection.rate_bytes_s = sent_bytes / (connection.used_s - began_s)
                began_s, sent_bytes = connection.used_s, 0

    async def _handle(self, message: Message, payload: bytes, size_bytes: int) -> None:
        self._setup.counters.received[traffic_of(message, payload)] += size_bytes
        self._handling += 1
        try:
            await self._setup.handler(self, message, payload)
        finally:
            self._handling -= 1
            self._note_heard()

    def make_beat(self, beat: Callable[[float, float, float], Beat]) -> None:
        """Send a heartbeat; it also acknowledges received bulk bytes."""
        now = trio.current_time()
        echo_s, held_s = (self.beat.sent_s, now - self._beat_heard_at) if self.beat else (0.0, 0.0)
        self.beat_sent_s = now
        self.send(beat(now, echo_s, held_s))
        if self.flow.stalled_s(now) > self._timeout_s:
            self.close(f"it acknowledged nothing for {self._timeout_s:.0f} s")

    @property
    def patience_s(self) -> float:
        """How long this peer may be silent: a few times the longest recent interval between Beats, within bounds."""
        return min(self._timeout_s, max(MIN_PATIENCE_S, MISSED_BEATS * max(self._waits, default=0.0)))

    @property
    def _timeout_s(self) -> float:
        """The user's time-out, or more if the peer's Beats are rarer."""
        return max(self._setup.peer_timeout_s, BEATS_APART * min(MAX_BEAT_EVERY_S, max(self._waits, default=0.0)))

    @property
    def silent_s(self) -> float:
        """Seconds since bytes arrived; 0 while we are not reading."""
        readers = [*self._readers, *(connection.reader for connection in self._bulk)]
        if self._handling or any(reader.held_up for reader in readers):
            return 0.0
        return trio.current_time() - self.last_heard

    def _note_heard(self) -> None:
        self.last_heard = trio.current_time()

    def _note_beat(self, beat: Beat) -> None:
        now = trio.current_time()
        if self.beat is not None:
            self._waits.append(now - self._beat_heard_at)
        # The members take memory; the handler reads them from the message.
        self.beat, self._beat_heard_at = msgspec.structs.replace(beat, members=()), now
        if beat.echo_s > 0:
            self.flow.note_round_trip(now - beat.echo_s - beat.held_s)
