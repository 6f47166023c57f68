"""The frames that wait to be sent on one link: control frames first, then round chunks and state, then fragments."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.links.flow_control import FlowControl
from p2ptrain.protocol.links.limits import MessageRates
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import Answer, Contribution, Fragment, Mean, Message, PairWeights
from p2ptrain.protocol.wire.transport import PeerId

# Queued bulk frames and their bytes. Senders wait if there are more, and one frame always fits.
MAX_BULK_QUEUE = 4
MAX_BULK_QUEUE_BYTES = 1024 * 1024
# Queued fragments, each of at most 4 MiB. If there are more, the oldest is dropped: a newer one is worth more.
MAX_FRAGMENT_QUEUE = 2
# Queued control frames and their bytes. If there are more, the link is closed. A record has at most 256 KiB.
MAX_CONTROL_QUEUE = 4096
MAX_CONTROL_QUEUE_BYTES = 4 * 1024 * 1024
# zstd saves about 4 % of int8 values at 100 MB/s for both directions (measured): it pays below 40 Mbit/s.
COMPRESS_BELOW_BYTES_S = 5_000_000


class Traffic(StrEnum):
    """The purpose of bytes on the wire, for metrics."""

    CONTROL = "control"
    ROUND = "round"
    STATE = "state"
    FRAGMENT = "fragment"


def traffic_of(message: Message, payload: bytes) -> Traffic:
    """The purpose of a received message."""
    match message:
        case Fragment():
            return Traffic.FRAGMENT
        case Contribution() | Mean() | PairWeights() | Answer(note="part"):
            return Traffic.ROUND
    return Traffic.STATE if payload else Traffic.CONTROL


@dataclass(slots=True)
class LinkCounters:
    """Bytes on the wire by purpose, fragments sent by receiver, and fragments dropped for lack of bandwidth."""

    sent: Counter[Traffic] = field(default_factory=Counter)
    received: Counter[Traffic] = field(default_factory=Counter)
    fragments_to: Counter[PeerId] = field(default_factory=Counter)
    fragments_sent: int = 0
    fragments_shed: int = 0


@dataclass(slots=True)
class _Bulk:
    """A queued bulk frame. It is encoded when it is sent, so that ages and acknowledgements are fresh.

    `keeps_to_stream`: it must arrive after the control frames before it. Only the link's stream ensures that.
    """

    make: Callable[[], Message]
    payload: bytes | memoryview
    traffic: Traffic
    compress: bool = False
    keeps_to_stream: bool = False
    until_s: float = math.inf


class Outbox:
    """Queues frames in bounded memory, and encodes the next one when it can be sent.

    Args:
        flow: decides whether a bulk frame or a fragment may be sent on the link's stream.
        rates: is told the sizes of answers.

    Attributes:
        lost_reason: why nothing is sent any more; empty until `close`.
        changed: tasks that wait here are woken when there may be a frame to send, and by `close`.
    """

    def __init__(self, peer_id: PeerId, flow: FlowControl, counters: LinkCounters, rates: MessageRates) -> None:
        self.changed = trio.lowlevel.ParkingLot()
        self.lost_reason = ""
        self._peer_id = peer_id
        self._flow = flow
        self._counters = counters
        self._rates = rates
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._bulk: deque[_Bulk] = deque()
        self._bulk_bytes = 0
        # Bytes sent under flow control up to the end of the last bulk frame on the stream.
        self._bulk_sent = 0
        self._fragments: deque[_Bulk] = deque()
        self._space = trio.lowlevel.ParkingLot()

    @property
    def has_bulk(self) -> bool:
        """Whether round chunks or state wait."""
        return bool(self._bulk)

    def add_control(self, message: Message) -> bool:
        """Queue a control frame; False if there is no room."""
        frame = frames.encode_frame(message, acked_bytes=self._flow.tell())
        full = self._control_bytes + len(frame) > MAX_CONTROL_QUEUE_BYTES
        if full or len(self._control) >= MAX_CONTROL_QUEUE:
            return False
        self._counters.sent[Traffic.CONTROL] += len(frame)
        self._control.append(frame)
        self._control_bytes += len(frame)
        self.changed.unpark_all()
        return True

    async def add_bulk(
        self, message: Message, payload: bytes | memoryview, traffic: Traffic, *, compress: bool
    ) -> None:
        """Queue a bulk frame, waiting while the queue is full. Raises PeerLostError."""
        while not self._has_bulk_room(len(payload)) and not self.lost_reason:
            await self._space.park()
        if self.lost_reason:
            raise PeerLostError(f"{self._peer_id}: {self.lost_reason}")
        self._bulk.append(_Bulk(lambda: message, payload, traffic, compress, isinstance(message, PairWeights)))
        self._bulk_bytes += len(payload)
        self.changed.unpark_all()

    def add_fragment(self, make: Callable[[], Fragment], payload: bytes, until_s: float) -> None:
        """Queue a fragment that is useful until `until_s`; drops the oldest queued one if there is no room."""
        while len(self._fragments) >= MAX_FRAGMENT_QUEUE:
            self._shed_fragment()
        self._fragments.append(_Bulk(make, payload, Traffic.FRAGMENT, until_s=until_s))
        self.changed.unpark_all()

    def close(self, reason: str) -> None:
        """Take no more frames, and send only the control frames that are queued."""
        self.lost_reason = reason
        self.changed.unpark_all()
        self._space.unpark_all()

    def note_acked(self) -> None:
        """Wake the writer if frames wait, as flow control may let more pass now."""
        if self._bulk or self._fragments:
            self.changed.unpark_all()

    def next_frame(self, *, has_bulk_connection: bool) -> bytes | None:
        """The next frame for the link's stream, or None. It is a bulk frame only if the link has no bulk connection."""
        if self._control:
            frame = self._control.popleft()
            self._control_bytes -= len(frame)
            return frame
        if self.lost_reason:
            return None
        while self._fragments and self._would_come_late(self._fragments[0]):
            self._shed_fragment()
        bulk_here = bool(self._bulk) and (not has_bulk_connection or self._bulk[0].keeps_to_stream)
        if not (bulk_here or self._fragments) or self._flow.in_flight >= self._flow.window_bytes:
            return None
        frame = self._take_bulk(on_stream=True) if bulk_here else self._encode(self._fragments.popleft(), True)
        self._flow.note_sent(len(frame), trio.current_time())
        if bulk_here:
            self._bulk_sent = self._flow.acked + self._flow.in_flight
        return frame

    def next_bulk_frame(self) -> bytes | None:
        """The next frame for the link's bulk connection, or None.

        None while bulk frames on the stream are not acknowledged, so that all bulk frames arrive in their order.
        """
        if not self._bulk or self.lost_reason or self._bulk[0].keeps_to_stream or self._flow.acked < self._bulk_sent:
            return None
        return self._take_bulk(on_stream=False)

    def _take_bulk(self, *, on_stream: bool) -> bytes:
        item = self._bulk.popleft()
        self._bulk_bytes -= len(item.payload)
        self._space.unpark()
        return self._encode(item, on_stream)

    def _encode(self, item: _Bulk, on_stream: bool) -> bytes:
        """Encode a frame. `on_stream`: with our flow control. A bulk connection has that of TCP, and outruns zstd."""
        message = item.make()
        acked_bytes = self._flow.tell() if on_stream else 0
        compress = on_stream and item.compress and self._flow.rate_bytes_s < COMPRESS_BELOW_BYTES_S
        frame = frames.encode_frame(message, item.payload, acked_bytes=acked_bytes, bulk=on_stream, compress=compress)
        self._counters.sent[item.traffic] += len(frame)
        if isinstance(message, Fragment):
            self._counters.fragments_sent += 1
            self._counters.fragments_to[self._peer_id] += 1
        elif isinstance(message, Answer):
            self._rates.note_answered(len(item.payload))
        return frame

    def _has_bulk_room(self, size_bytes: int) -> bool:
        fits = not self._bulk or self._bulk_bytes + size_bytes <= MAX_BULK_QUEUE_BYTES
        return fits and len(self._bulk) < MAX_BULK_QUEUE

    def _would_come_late(self, item: _Bulk) -> bool:
        """Whether a fragment would arrive too late; False while the path's rate is unknown."""
        path_s = self._flow.delivery_s(len(item.payload))
        return path_s > 0 and trio.current_time() + path_s > item.until_s

    def _shed_fragment(self) -> None:
        self._fragments.popleft()
        self._counters.fragments_shed += 1
