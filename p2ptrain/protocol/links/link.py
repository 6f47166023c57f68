"""One link to one partner: framed messages over its stream(s), by priority, with flow control and a heartbeat.

The transport below shares one connection per pair and buffers megabytes, so on a saturated path a heartbeat would
wait behind them all. Hence flow control of our own: at most about a quarter of a second's worth of bulk bytes is
unacknowledged, control frames go before round chunks, and round chunks before fragments, of which those that would come
too late are dropped when the path is too slow.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import (
    Ack,
    Answer,
    Beat,
    Contribution,
    Fragment,
    Hello,
    Leave,
    Message,
)
from p2ptrain.protocol.wire.transport import PeerId, Stream
from p2ptrain.settings.config import NetworkConfig

# Unacknowledged bulk bytes: at least 64 KiB, else 0.25 s (and the round trip) at the measured rate (DESIGN.md). A frame
# goes out while there are less, so that a path whose round trip is long can show that it carries more.
MIN_WINDOW_BYTES = 64 * 1024
WINDOW_S = 0.25
# Round trips remembered, one a second: the shortest is the path's own, the others waited behind our bulk bytes too.
ROUND_TRIPS = 60
# The receiver acknowledges at the latest after this many bytes, so that a minimal window never stalls.
ACK_EVERY_BYTES = 24 * 1024
# Bulk frames waiting in the process; their senders wait beyond that.
MAX_BULK_QUEUE = 4
# Fragments waiting; the oldest is dropped beyond that: a newer one is worth more.
MAX_FRAGMENT_QUEUE = 2
# Control frames waiting; a partner that takes none of 4096 is gone.
MAX_CONTROL_QUEUE = 4096
# zstd takes about 4 % off int8 values at 100 MB/s there and back (measured): it pays on links slower than 40 Mbit/s.
COMPRESS_BELOW_BYTES_S = 5_000_000
# Unacknowledged bulk bytes without any progress for this long mean a dead path, whatever the heartbeat says; and the
# longest that a silent partner counts as there. A user's setting.
PEER_TIMEOUT_S = NetworkConfig.peer_timeout_s
# A killed peer's stream breaks at once. This is for those that freeze or fall off the network: beats come every second,
# and several times the longest wait for one of late is no chance any more. At least ten beats, since a quiet link says
# nothing about a full one: eight links' windows fill an uplink of 2 Mbit/s for four seconds.
MISSED_BEATS = 5
MIN_PATIENCE_S = 10.0

# What is queued last is often a Leave: a moment for it to go out.
LAST_WORDS_S = 0.2

Handler = Callable[["Link", Message, bytes], Awaitable[None]]


class Traffic(enum.StrEnum):
    """What bytes are spent on, for the records."""

    CONTROL = "control"
    ROUND = "round"
    STATE = "state"
    FRAGMENT = "fragment"


@dataclass(slots=True)
class _Bulk:
    """A bulk frame to be, encoded when its turn comes so that ages and acknowledgements are fresh."""

    make: Callable[[], Message]
    payload: bytes | memoryview
    traffic: Traffic
    compress: bool = False
    until_s: float = math.inf


@dataclass(slots=True)
class LinkCounters:
    """Bytes on the wire by purpose, fragments by receiver, and those dropped for lack of bandwidth."""

    sent: Counter[Traffic] = field(default_factory=Counter)
    received: Counter[Traffic] = field(default_factory=Counter)
    fragments_to: Counter[PeerId] = field(default_factory=Counter)
    fragments_sent: int = 0
    fragments_shed: int = 0


class Link:
    """A live partner. Created by `Links` after both sides have said Hello; dead for good once `lost` is set."""

    def __init__(
        self, peer_id: PeerId, hello: Hello, counters: LinkCounters, handler: Handler,
        *, peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.peer_id = peer_id
        self.hello = hello
        self.beat: Beat | None = None
        self.lost = trio.Event()
        self.lost_reason = ""
        self.left = False
        self.opened_s = self.last_heard = self.bulk_heard_s = trio.current_time()
        self.rtt_s = 0.0
        self.rate_bytes_s = 0.0
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._peer_timeout_s = peer_timeout_s
        self._waits: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._beat_heard_at = 0.0
        self._counters = counters
        self._handler = handler
        self._streams: list[Stream] = []
        self._control: deque[bytes] = deque()
        self._bulk: deque[_Bulk] = deque()
        self._fragments: deque[_Bulk] = deque()
        self._work = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._sent_bulk = 0
        self._acked_bulk = 0
        self._received_bulk = 0
        self._received_told = 0
        self._progress_at = 0.0
        self._measure_start_s = 0.0
        self._measure_start_bytes = 0
        self._measures_from_idle = True

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue a control frame; goes out before anything else. Silently lost when the link is."""
        if self.lost.is_set():
            return
        frame = frames.encode_frame(message, acked_bytes=self._note_told())
        if len(self._control) >= MAX_CONTROL_QUEUE:
            self.close("it takes no frames any more")
            return
        self._counters.sent[Traffic.CONTROL] += len(frame)
        self._control.append(frame)
        self._work.unpark_all()

    async def send_bulk(
        self, message: Message, payload: bytes | memoryview, traffic: Traffic, *, compress: bool = False
    ) -> None:
        """Queue one chunk, waiting while the path is full. Raises PeerLostError."""
        while len(self._bulk) >= MAX_BULK_QUEUE and not self.lost.is_set():
            await self._space.park()
        if self.lost.is_set():
            raise PeerLostError(f"{self.peer_id}: {self.lost_reason}")
        self._bulk.append(_Bulk(lambda: message, payload, traffic, compress))
        self._work.unpark_all()

    def send_fragment(self, make: Callable[[], Fragment], payload: bytes, *, until_s: float = math.inf) -> None:
        """Queue a fragment that is of use until `until_s`, dropping the oldest waiting one when there is no room."""
        if self.lost.is_set():
            return
        while len(self._fragments) >= MAX_FRAGMENT_QUEUE:
            self._shed_fragment()
        self._fragments.append(_Bulk(make, payload, Traffic.FRAGMENT, until_s=until_s))
        self._work.unpark_all()

    @property
    def window_bytes(self) -> float:
        """Bulk bytes that may be unacknowledged before the next bulk frame has to wait."""
        return max(MIN_WINDOW_BYTES, (WINDOW_S + self._path_rtt_s) * self.rate_bytes_s)

    def close(self, reason: str) -> None:
        """Declare the link dead; tasks of `run_stream` end and close their streams."""
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()
            self._work.unpark_all()
            self._space.unpark_all()

    # --- running ------------------------------------------------------------------------------------------------

    async def run_stream(self, stream: Stream, read_ahead: bytes) -> None:
        """Serve one stream of this link until the link dies. The first stream also carries what we send."""
        self._streams.append(stream)
        all_written = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, stream, read_ahead)
                if len(self._streams) == 1:
                    nursery.start_soon(self._write, stream, all_written)
                else:
                    all_written.set()
                await self.lost.wait()
                with trio.move_on_after(LAST_WORDS_S):
                    await all_written.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close("its stream was closed")
            await stream.aclose()

    async def _write(self, stream: Stream, all_written: trio.Event) -> None:
        try:
            while True:
                frame = self._next_frame()
                if frame is None:
                    if self.lost.is_set():
                        return
                    await self._work.park()
                    continue
                await stream.send_all(frame)
        except PeerLostError as error:
            self.close(str(error))
        finally:
            all_written.set()

    def _next_frame(self) -> bytes | None:
        if self._control:
            return self._control.popleft()
        if self.lost.is_set():
            return None
        in_flight = self._sent_bulk - self._acked_bulk
        while self._fragments and self._would_come_late(self._fragments[0], in_flight):
            self._shed_fragment()
        queue = self._bulk or self._fragments
        if not queue or in_flight >= self.window_bytes:
            return None
        item = queue.popleft()
        self._space.unpark()
        message = item.make()
        frame = frames.encode_frame(
            message,
            item.payload,
            acked_bytes=self._note_told(),
            bulk=True,
            compress=item.compress and self.rate_bytes_s < COMPRESS_BELOW_BYTES_S,
        )
        if in_flight == 0:
            self._progress_at = trio.current_time()
            self._start_measuring(from_idle=True)
        self._sent_bulk += len(frame)
        self._counters.sent[item.traffic] += len(frame)
        if isinstance(message, Fragment):
            self._counters.fragments_sent += 1
            self._counters.fragments_to[self.peer_id] += 1
        return frame

    def _would_come_late(self, item: _Bulk, in_flight: int) -> bool:
        """Whether a path with this many bytes on it would deliver too late. Nobody knows before there are any."""
        if not in_flight or not self.rate_bytes_s:
            return False
        path_s = (in_flight + len(item.payload)) / self.rate_bytes_s + self._path_rtt_s / 2
        return trio.current_time() + path_s > item.until_s

    def _shed_fragment(self) -> None:
        self._fragments.popleft()
        self._counters.fragments_shed += 1

    async def _read(self, stream: Stream, read_ahead: bytes) -> None:
        reader = FrameReader(stream, read_ahead, self._note_heard)
        try:
            while True:
                prefix, message, payload = await reader.frame()
                self._note_acked(prefix.acked_bytes)
                size = frames.PREFIX_BYTES + prefix.body_bytes
                traffic = _traffic_of(message, payload)
                self._counters.received[traffic] += size
                if prefix.bulk:
                    self.bulk_heard_s = trio.current_time()
                    self._received_bulk += size
                    if self._received_bulk - self._received_told >= ACK_EVERY_BYTES:
                        self.send(Ack())
                if isinstance(message, Beat):
                    self._note_beat(message)
                elif isinstance(message, Leave):
                    self.left = True
                await self._handler(self, message, payload)
                if self.left:
                    self.close("it left the run")
        except PeerLostError as error:
            self.close(str(error))
        except WireError as error:
            self.close(f"it broke the protocol: {error}")
            raise

    # --- measures -----------------------------------------------------------------------------------------------

    def make_beat(self, beat: Callable[[float, float, float], Beat]) -> None:
        """Send a heartbeat; bytes received since the last acknowledgement ride along."""
        now = trio.current_time()
        echo = self.beat.sent_s if self.beat else 0.0
        held = now - self._beat_heard_at if self.beat else 0.0
        self.send(beat(now, echo, held))
        if self._sent_bulk > self._acked_bulk and now - self._progress_at > self._peer_timeout_s:
            self.close(f"it acknowledged nothing for {self._peer_timeout_s:.0f} s")

    @property
    def patience_s(self) -> float:
        """How long this partner may be silent: a few times the longest wait for a beat of late, within bounds."""
        return min(self._peer_timeout_s, max(MIN_PATIENCE_S, MISSED_BEATS * max(self._waits, default=0.0)))

    def _note_heard(self) -> None:
        self.last_heard = trio.current_time()

    def _note_beat(self, beat: Beat) -> None:
        now = trio.current_time()
        if self.beat is not None:
            self._waits.append(now - self._beat_heard_at)
        self.beat, self._beat_heard_at = beat, now
        if beat.echo_s > 0:
            sample = now - beat.echo_s - beat.held_s
            if 0 <= sample < 60:
                self.rtt_s = sample if self.rtt_s == 0 else 0.8 * self.rtt_s + 0.2 * sample
                self._round_trips.append(sample)

    @property
    def _path_rtt_s(self) -> float:
        return min(self._round_trips, default=0.0)

    def _note_told(self) -> int:
        self._received_told = self._received_bulk
        return self._received_bulk

    def _note_acked(self, acked_bytes: int) -> None:
        if acked_bytes > self._sent_bulk:
            raise WireError(f"acknowledges {acked_bytes} bytes, {self._sent_bulk} were sent")
        if acked_bytes <= self._acked_bulk:
            return
        self._acked_bulk = acked_bytes
        self._progress_at = trio.current_time()
        self._measure_rate()
        self._work.unpark_all()

    def _start_measuring(self, *, from_idle: bool) -> None:
        self._measure_start_s, self._measure_start_bytes = trio.current_time(), self._acked_bulk
        self._measures_from_idle = from_idle

    def _measure_rate(self) -> None:
        """Take what was acknowledged since the start for the path's rate: it rises at once and falls slowly.

        A burst of ours says little about the path, hence slowly. Acknowledgements that were held up come all at once;
        so a start that was not the first frame on an idle path needs some time behind it.
        """
        elapsed_s = trio.current_time() - self._measure_start_s
        delivered = self._acked_bulk - self._measure_start_bytes
        if delivered < MIN_WINDOW_BYTES // 2 or elapsed_s <= 0:
            return
        rate = delivered / elapsed_s
        whole = elapsed_s >= max(WINDOW_S, self._path_rtt_s)
        if whole or self._measures_from_idle:
            self.rate_bytes_s = max(self.rate_bytes_s, rate)
        if whole:
            self.rate_bytes_s = max(rate, 0.9 * self.rate_bytes_s + 0.1 * rate)
            self._start_measuring(from_idle=False)


def _traffic_of(message: Message, payload: bytes) -> Traffic:
    match message:
        case Fragment():
            return Traffic.FRAGMENT
        case Contribution() | Answer(note="part"):
            return Traffic.ROUND
    return Traffic.STATE if payload else Traffic.CONTROL


class FrameReader:
    """Cuts a byte stream into frames; every size is checked before the bytes behind it are awaited.

    `on_bytes` is called whenever anything arrives, also in the middle of a long frame.
    """

    def __init__(self, stream: Stream, read_ahead: bytes = b"", on_bytes: Callable[[], None] = lambda: None) -> None:
        self._stream = stream
        self._buffer = bytearray(read_ahead)
        self._on_bytes = on_bytes

    async def frame(self) -> tuple[frames.Prefix, Message, bytes]:
        """The next frame. Raises WireError, and PeerLostError at the end of the stream, clean or not."""
        prefix = frames.decode_prefix(await self._take(frames.PREFIX_BYTES))
        message, payload = frames.decode_body(prefix, await self._take(prefix.body_bytes))
        return prefix, message, payload

    @property
    def read_ahead(self) -> bytes:
        """What was received behind the last frame, for the next reader of this stream."""
        return bytes(self._buffer)

    async def _take(self, size: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < size:
            data = await self._stream.receive_some()
            if not data:
                raise PeerLostError("it closed the connection")
            self._on_bytes()
            buffer += data
        taken = bytes(memoryview(buffer)[:size])
        del buffer[:size]
        return taken
