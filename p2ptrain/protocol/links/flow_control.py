"""Limits the unacknowledged bulk bytes of one link.

The transport shares one connection per pair of peers and buffers megabytes. So at most about a quarter of a second's
worth of bulk bytes, at the measured rate, is unacknowledged. `now` is in seconds on any clock.
"""

from __future__ import annotations

from collections import deque

from p2ptrain.errors import WireError

# Unacknowledged bulk bytes: 64 KiB, or 0.25 s plus the round trip at the measured rate if that is more. A frame is sent
# while there are less, so that the measured rate can rise on a path with a long round trip.
MIN_WINDOW_BYTES = 64 * 1024
WINDOW_S = 0.25
# Round trips remembered, one per second: the shortest is the path's own; others include waiting behind bulk bytes.
ROUND_TRIPS = 60
# A longer one comes from a clock that jumped or a false echo.
MAX_ROUND_TRIP_S = 60.0
# The receiver acknowledges after at most this many bytes, so that a minimal window never stalls.
ACK_EVERY_BYTES = 24 * 1024


class FlowControl:
    """The bulk bytes of one link, in both directions.

    Attributes:
        rtt_s: smoothed round trip; 0 if unknown.
        rate_bytes_s: bulk bytes per second that the path carries; 0 if unknown.
        in_flight: bulk bytes sent and not acknowledged.
    """

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self.rate_bytes_s = 0.0
        self.in_flight = 0
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._acked = 0
        self._received = 0
        self._told = 0
        self._progress_at = 0.0
        self._measure_start_s = 0.0
        self._measure_start_bytes = 0
        self._measures_from_idle = True

    @property
    def acked(self) -> int:
        """Bulk bytes that the receiver has acknowledged."""
        return self._acked

    @property
    def window_bytes(self) -> float:
        """Unacknowledged bulk bytes at which bulk frames wait."""
        return max(MIN_WINDOW_BYTES, (WINDOW_S + self.path_rtt_s) * self.rate_bytes_s)

    @property
    def path_rtt_s(self) -> float:
        """The shortest round trip of the last minute; 0 if unknown."""
        return min(self._round_trips, default=0.0)

    def delivery_s(self, size_bytes: int) -> float:
        """Estimated seconds until a frame that is sent now arrives; 0 if unknown."""
        if not self.in_flight or not self.rate_bytes_s:
            return 0.0
        return (self.in_flight + size_bytes) / self.rate_bytes_s + self.path_rtt_s / 2

    def note_sent(self, size_bytes: int, now: float) -> None:
        """Note that a bulk frame is sent."""
        if self.in_flight == 0:
            self._progress_at = now
            self._start_measuring(now, from_idle=True)
        self.in_flight += size_bytes

    def note_acked(self, acked_bytes: int, now: float) -> bool:
        """Take the receiver's count of bulk bytes; True if it advanced. Raises WireError if it is too high."""
        sent = self._acked + self.in_flight
        if acked_bytes > sent:
            raise WireError(f"acknowledges {acked_bytes} bytes, {sent} were sent")
        if acked_bytes <= self._acked:
            return False
        self._acked, self.in_flight = acked_bytes, sent - acked_bytes
        self._progress_at = now
        self._measure_rate(now)
        return True

    def note_round_trip(self, sample_s: float) -> None:
        """Take the round trip of a heartbeat."""
        if 0 <= sample_s < MAX_ROUND_TRIP_S:
            self.rtt_s = sample_s if self.rtt_s == 0 else 0.8 * self.rtt_s + 0.2 * sample_s
            self._round_trips.append(sample_s)

    def stalled_s(self, now: float) -> float:
        """Seconds since an acknowledgement, while bulk bytes are unacknowledged."""
        return now - self._progress_at if self.in_flight else 0.0

    def _start_measuring(self, now: float, *, from_idle: bool) -> None:
        self._measure_start_s, self._measure_start_bytes = now, self._acked
        self._measures_from_idle = from_idle

    def _measure_rate(self, now: float) -> None:
        """Measure the path's rate since the start of the measurement. The estimate rises at once and falls slowly.

        Slowly, because our own traffic may be what was low. Delayed acknowledgements arrive in bursts, so measurements
        that did not start on an idle path must cover some time.
        """
        elapsed_s = now - self._measure_start_s
        delivered = self._acked - self._measure_start_bytes
        if delivered < MIN_WINDOW_BYTES // 2 or elapsed_s <= 0:
            return
        rate = delivered / elapsed_s
        whole = elapsed_s >= max(WINDOW_S, self.path_rtt_s)
        if whole or self._measures_from_idle:
            self.rate_bytes_s = max(self.rate_bytes_s, rate)
        if whole:
            self.rate_bytes_s = max(rate, 0.9 * self.rate_bytes_s + 0.1 * rate)
            self._start_measuring(now, from_idle=False)

    def note_received(self, size_bytes: int) -> bool:
        """Note a received bulk frame; True if an acknowledgement is due."""
        self._received += size_bytes
        return self._received - self._told >= ACK_EVERY_BYTES

    def tell(self) -> int:
        """The count of received bulk bytes, for a frame that is sent now."""
        self._told = self._received
        return self._received
