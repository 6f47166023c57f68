"""Limits the unacknowledged bulk bytes of one link.

The transport shares one connection per pair of peers and buffers megabytes. So this limit is what the path carries in
its round trip and a quarter of a second. The path's rate is the largest of the last ten round trips, as in BBR
(Cardwell et al., "BBR: Congestion-Based Congestion Control", 2016; the samples are those of
draft-cheng-iccrg-delivery-rate-estimation). `now` is in seconds on any clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from p2ptrain.errors import WireError

# A frame is sent while fewer bulk bytes are unacknowledged than the path carries in its round trip and 0.25 s, or than
# 64 KiB, or than 256 KiB until a flight has filled the path (4 s of an uplink of 64 kB/s; a heartbeat may be later than
# that). The quarter of a second covers busy machines, and lets the measured rate rise: at a round trip of 0.2 s, 2.25
# times with each.
FIRST_WINDOW_BYTES = 256 * 1024
MIN_WINDOW_BYTES = 64 * 1024
WINDOW_S = 0.25
# The rate is the largest within this many round trips (BBR), each with the quarter of a second that the window adds.
RATE_ROUND_TRIPS = 10
# Heartbeats remembered, one per second. The shortest round trip is the path's own; in others, the heartbeat waited
# behind bulk bytes.
ROUND_TRIPS = 60
# A longer round trip comes from a clock that jumped, or a false echo.
MAX_ROUND_TRIP_S = 60.0
# One counts as this at most: rounds wait for a few of them, so a false one would stretch each round. A satellite link
# with a full queue has about this (guess).
MOST_ROUND_TRIP_S = 3.0
# The receiver acknowledges after at most this many bytes, so that a minimal window never stalls.
ACK_EVERY_BYTES = 24 * 1024


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bulk frame that is not acknowledged.

    Attributes:
        end: bytes sent in all, including this frame.
        sent_s: when it was sent.
        first_sent_s: when the last frame that was acknowledged by then had been sent.
        acked, acked_s: how many bytes were acknowledged by then, and when the last of them.
        fills: whether it filled the window.
    """

    end: int
    sent_s: float
    first_sent_s: float
    acked: int
    acked_s: float
    fills: bool


class FlowControl:
    """The bulk bytes of one link, in both directions.

    Attributes:
        rtt_s: smoothed round trip, of which each counts as MOST_ROUND_TRIP_S at most; 0 if unknown.
        in_flight: bulk bytes sent and not acknowledged.
        acked: bulk bytes acknowledged by the receiver.
        is_filled: whether a flight has filled the path, so that its rate is known.
    """

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self.in_flight = 0
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self.acked = 0
        self._acked_s = 0.0
        self._first_sent_s = 0.0
        self._received = 0
        self._told = 0
        self._flights: deque[_Flight] = deque()
        # The rates that are or can still become the largest, with the time of each; the rates fall.
        self._rates: deque[tuple[float, float]] = deque()
        self.is_filled = False

    @property
    def rate_bytes_s(self) -> float:
        """Bulk bytes per second that the path carries; 0 if unknown, and too low if the path was never filled."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def window_bytes(self) -> float:
        """Unacknowledged bulk bytes at which bulk frames wait."""
        least = MIN_WINDOW_BYTES if self.is_filled else FIRST_WINDOW_BYTES
        return max(least, (WINDOW_S + self.path_rtt_s) * self.rate_bytes_s)

    @property
    def path_rtt_s(self) -> float:
        """The shortest round trip of the last minute; 0 if unknown."""
        return min(self._round_trips, default=0.0)

    def delivery_s(self, size_bytes: int) -> float:
        """Estimated seconds until a frame that is sent now arrives; 0 if unknown."""
        if not self.in_flight or not self.is_filled:
            return 0.0
        return (self.in_flight + size_bytes) / self.rate_bytes_s + self.path_rtt_s / 2

    def note_sent(self, size_bytes: int, now: float) -> None:
        """Note that a bulk frame is sent."""
        if self.in_flight == 0:
            self._acked_s = self._first_sent_s = now
        self.in_flight += size_bytes
        end, fills = self.acked + self.in_flight, self.in_flight >= self.window_bytes
        self._flights.append(_Flight(end, now, self._first_sent_s, self.acked, self._acked_s, fills))

    def note_acked(self, acked_bytes: int, now: float) -> bool:
        """Take the receiver's count of bulk bytes; True if it advanced. Raises WireError if it is too high."""
        sent = self.acked + self.in_flight
        if acked_bytes > sent:
            raise WireError(f"acknowledges {acked_bytes} bytes, {sent} were sent")
        if acked_bytes <= self.acked:
            return False
        self.acked, self._acked_s, self.in_flight = acked_bytes, now, sent - acked_bytes
        newest = None
        while self._flights and self._flights[0].end <= acked_bytes:
            newest = self._flights.popleft()
        if newest is not None:
            self._first_sent_s = newest.sent_s
            self._measure_rate(newest, now)
        return True

    def note_round_trip(self, sample_s: float) -> None:
        """Take the round trip of a heartbeat."""
        if 0 <= sample_s < MAX_ROUND_TRIP_S:
            counted_s = min(sample_s, MOST_ROUND_TRIP_S)
            self.rtt_s = counted_s if self.rtt_s == 0 else 0.8 * self.rtt_s + 0.2 * counted_s
            self._round_trips.append(sample_s)

    def stalled_s(self, now: float) -> float:
        """Seconds since an acknowledgement, while bulk bytes are unacknowledged."""
        return now - self._acked_s if self.in_flight else 0.0

    def unacked_s(self, now: float) -> float:
        """Seconds since the oldest bulk frame that is not acknowledged was sent."""
        return now - self._flights[0].sent_s if self._flights else 0.0

    def _measure_rate(self, flight: _Flight, now: float) -> None:
        """Measure the rate at which the path carried what was acknowledged since this frame was sent.

        The longer of the times of sending and of acknowledging counts, because acknowledgements that come all at once
        do not mean a fast path. A frame that filled the window, or waited on the way, shows the path's rate. Any other
        frame shows only that the path is not slower.
        """
        elapsed_s = max(now - flight.acked_s, flight.sent_s - flight.first_sent_s)
        delivered = self.acked - flight.acked
        if elapsed_s <= 0 or delivered <= ACK_EVERY_BYTES:
            return  # the next heartbeat acknowledges so few bytes
        rate = delivered / elapsed_s
        # Of fewer bytes, the receiver may wait for more before it acknowledges them; some may be acknowledged already.
        is_told_at_once = flight.end - flight.acked >= 2 * ACK_EVERY_BYTES
        full = flight.fills or (is_told_at_once and now - flight.sent_s > self.path_rtt_s + WINDOW_S)
        if not full and rate <= self.rate_bytes_s:
            return
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        if full:
            self.is_filled = True
            while self._rates[0][0] < now - RATE_ROUND_TRIPS * (self.path_rtt_s + WINDOW_S):
                self._rates.popleft()

    def note_received(self, size_bytes: int) -> bool:
        """Note a received bulk frame; True if an acknowledgement is due."""
        self._received += size_bytes
        return self._received - self._told >= ACK_EVERY_BYTES

    def tell(self) -> int:
        """The number of bulk bytes received, for a frame that is sent now."""
        self._told = self._received
        return self._received
