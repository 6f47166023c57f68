"""The rate of a connection to a peer: it counts what we upload, throws it away, and says how fast it came.

A stranger may ask for this, so it costs the asked peer little: it sends eight bytes, and takes one upload at a time,
8 MiB in 2 s at most, and from all together 32 MiB at once and 32 MiB a minute on average. It sends no bytes for a
measurement of the other direction: then a stranger could have them sent.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError
from p2ptrain.network.control import open_stream
from p2ptrain.network.socket_stream import SocketStream
from p2ptrain.network.thread import open_background
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.transport import Refusal, Stream

logger = logging.getLogger(__name__)

RATE = "p2ptrain/rate/1"
# TCP leaves its slow start at 100 Mbit/s and 100 ms after the first 2 MB, and in 0.8 s.
MOST_BYTES, MOST_S = 8 * 1024 * 1024, 2.0
# Four interfaces of one machine; 4.5 Mbit/s on average if strangers ask all the time (guess).
MOST_BYTES_A_MINUTE = 4 * MOST_BYTES
# Opening a stream and the answer's way back, on a slow path with a full buffer.
OPEN_TIMEOUT_S, ANSWER_TIMEOUT_S = 3.0, MOST_S + 3.0
_ANSWER = struct.Struct(">Q")
_ZEROS = bytes(64 * 1024)

Arrival = tuple[float, int]
"""When bytes arrived, in seconds on any clock, and how many had then come in all."""


def bytes_per_s(arrivals: Sequence[Arrival]) -> float | None:
    """The rate in the later half of the time, when TCP has left its slow start; None if there is no time between."""
    if not arrivals:
        return None
    ended_s, in_all = arrivals[-1]
    middle_s = (arrivals[0][0] + ended_s) / 2
    then_s, before = max(arrival for arrival in arrivals if arrival[0] <= middle_s)
    return (in_all - before) / (ended_s - then_s) if ended_s > then_s else None


class RateCounter:
    """Answers those who ask how fast they can send to us."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._allowance = TokenBucket(MOST_BYTES_A_MINUTE / 60, MOST_BYTES_A_MINUTE, now=0.0)
        self._errors = ErrorLog(logger)
        # Without room, so that only a stream that is served now is taken.
        self._waiting, self._incoming = trio.open_memory_channel[SocketStream](0)

    def take(self, stream: SocketStream) -> None:
        """Take an upload. Called in the event loop."""
        try:
            self._waiting.send_nowait(stream)
        except trio.WouldBlock:
            stream.fail("another one is measured")

    async def serve(self) -> None:
        """Count uploads, until cancelled."""
        async for stream in self._incoming:
            with self._errors.containing("measuring a rate"):
                try:
                    if self._refusal(stream.remote) is None:
                        await self._count(stream)
                except PeerLostError as error:
                    logger.debug("the rate from %s was not measured: %s", stream.remote, error)
                finally:
                    await stream.aclose()

    async def _count(self, stream: Stream) -> None:
        if not self._allowance.spend(MOST_BYTES, trio.current_time()):
            return
        arrivals: list[Arrival] = []
        count = 0
        try:
            with trio.move_on_after(MOST_S):
                while count < MOST_BYTES and (data := await stream.receive_some()):
                    count += len(data)
                    arrivals.append((trio.current_time(), count))
        finally:
            self._allowance.give_back(max(0, MOST_BYTES - count))
        if (rate := bytes_per_s(arrivals)) is not None:
            with trio.move_on_after(MOST_S):
                await stream.send_all(_ANSWER.pack(int(rate)))


async def upload_rate(control_path: str, peer_id: str) -> float | None:
    """Bytes per second from us to a connected peer; None if it does not measure that, or not now."""
    try:
        stream = await open_stream(control_path, peer_id, RATE, OPEN_TIMEOUT_S)
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                return await _upload(stream)
        finally:
            stream.fail("measured")
    except PeerLostError as error:
        logger.debug("%s does not measure our rate: %s", peer_id, error)
    return None


async def _upload(stream: Stream) -> float | None:
    """Send until an answer comes. Raises PeerLostError."""
    answer = b""
    async with open_background() as background:
        background.start_soon(_send_zeros, stream)
        while len(answer) < _ANSWER.size and (data := await stream.receive_some()):
            answer += data
    return float(_ANSWER.unpack(answer)[0]) if len(answer) == _ANSWER.size else None


async def _send_zeros(stream: Stream) -> None:
    try:
        for _ in range(MOST_BYTES // len(_ZEROS)):
            await stream.send_all(_ZEROS)
    except PeerLostError as error:
        logger.debug("the peer takes no more bytes: %s", error)
