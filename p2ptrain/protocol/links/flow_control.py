"""How many bulk bytes one link may have on its way, from what its partner acknowledges.

The transport below shares one connection per pair and buffers megabytes. So we keep at most about a quarter of a
second's worth of bulk bytes unacknowledged, at the rate that acknowledgements show. No clock of its own: every
`now` is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque

from p2ptrain.errors import WireError

# Unacknowledged bulk bytes: at least 64 KiB, else 0.25 s (and the round trip) at the measured rate (DESIGN.md). A frame
# goes out while there are less, so that a path whose round trip is long can show that it carries more.
MIN_WINDOW_BYTES = 64 * 1024
WINDOW_S = 0.25
# Round trips remembered, one a second: the shortest is the path's own, the others waited behind our bulk bytes too.
ROUND_TRIPS = 60
# A longer one is a clock that jumped, or an echo that was made up.
MAX_ROUND_TRIP_S = 60.0
# The receiver acknowledges at the latest after this many bytes, so that a minimal window never stalls.
ACK_EVERY_BYTES = 24 * 1024


class FlowControl:
    """The bulk bytes of one link, in both directions.

    Attributes:
        rtt_s: round trip, smoothed; 0 while not known.
        rate_bytes_s: bulk bytes a second that the path carries; 0 while not known.
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

    # --- what we send ---------------------------------------------------------------------------------------------

    @property
    def window_bytes(self) -> float:
        """Bulk bytes that may be unacknowledged before the next bulk frame has to wait."""
        return max(MIN_WINDOW_BYTES, (WINDOW_S + self.path_rtt_s) * self.rate_bytes_s)

    @property
    def path_rtt_s(self) -> float:
        """The shortest round trip of the last minute; 0 while not known."""
        return min(self._round_trips, default=0.0)

    def delivery_s(self, size_bytes: int) -> float:
        """Seconds until a frame that is sent now has arrived, by what the path did so far. 0 where nobody knows."""
        if not self.in_flight or not self.rate_bytes_s:
            return 0.0
        return (self.in_flight + size_bytes) / self.rate_bytes_s + self.path_rtt_s / 2

    def note_sent(self, size_bytes: int, now: float) -> None:
        """A bulk frame goes out."""
        if self.in_flight == 0:
            self._progress_at = now
            self._start_measuring(now, from_idle=True)
        self.in_flight += size_bytes

    def note_acked(self, acked_bytes: int, now: float) -> bool:
        """Take the partner's count of bulk bytes that it has received. True when there is room for more.

        Raises WireError when it is more than was sent.
        """
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
        """A heartbeat came back."""
        if 0 <= sample_s < MAX_ROUND_TRIP_S:
            self.rtt_s = sample_s if self.rtt_s == 0 else 0.8 * self.rtt_s + 0.2 * sample_s
            self._round_trips.append(sample_s)

    def stalled_s(self, now: float) -> float:
        """Seconds for which bulk bytes have been on their way without any being acknowledged."""
        return now - self._progress_at if self.in_flight else 0.0

    def _start_measuring(self, now: float, *, from_idle: bool) -> None:
        self._measure_start_s, self._measure_start_bytes = now, self._acked
        self._measures_from_idle = from_idle

    def _measure_rate(self, now: float) -> None:
        """Take what was acknowledged since the start for the path's rate: it rises at once and falls slowly.

        A burst of ours says little about the path, hence slowly. Acknowledgements that were held up come all at once;
        so a start that was not the first frame on an idle path needs some time behind it.
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

    # --- what we receive ------------------------------------------------------------------------------------------

    def note_received(self, size_bytes: int) -> bool:
        """A bulk frame has come. True when it is time to acknowledge."""
        self._received += size_bytes
        return self._received - self._told >= ACK_EVERY_BYTES

    def tell(self) -> int:
        """The count of received bulk bytes for a frame that goes out now."""
        self._told = self._received
        return self._received
