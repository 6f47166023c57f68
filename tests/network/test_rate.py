"""The rate of an upload, and what measuring it may cost the peer that is asked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from p2ptrain.network import ways
from p2ptrain.network.ways import (
    MOST_BYTES,
    MOST_BYTES_A_MINUTE,
    MOST_S,
    Arrival,
    RateCounter,
    bytes_per_s,
    upload_rate,
)
from p2ptrain.protocol.wire.transport import Refusal, no_refusal
from tests.network.local import open_pair

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], None),
        ([(3.0, 500)], None),
        ([(3.0, 500), (3.0, 900)], None),
        ([(3.0, 500), (4.0, 900)], 400),
        ([(3.0, 1), (4.0, 101), (5.0, 1101)], 1000),  # a slow start
        ([(0.0, 10), (0.1, 20), (1.9, 30), (2.0, 1030)], 1010 / 1.9),  # a burst after a pause is no rate
    ],
)
def test_a_rate_is_that_of_the_later_half(arrivals: list[Arrival], rate: float | None) -> None:
    assert bytes_per_s(arrivals) == (None if rate is None else pytest.approx(rate))


class Uploaded:
    """A stream from a peer that sends pieces of one size at one pace, forever."""

    def __init__(self, size: int, every_s: float, remote: str = "QmA") -> None:
        self.remote = remote
        self.sent, self.received_bytes, self.closed, self.failed = b"", 0, False, ""
        self._size, self._every_s = size, every_s

    async def receive_some(self) -> bytes:
        await trio.sleep(self._every_s)
        self.received_bytes += self._size
        return bytes(self._size)

    async def send_all(self, data: bytes) -> None:
        self.sent += data

    async def aclose(self) -> None:
        self.closed = True

    def fail(self, reason: str) -> None:
        self.failed = reason

    @property
    def answer(self) -> int | None:
        return struct.unpack(">Q", self.sent)[0] if self.sent else None


def counted(*streams: Uploaded, pause_s: float = 60.0, refusal: Refusal = no_refusal) -> None:
    """One upload after the other, each so long after the one before."""

    async def main() -> None:
        counter = RateCounter(refusal)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(counter.service.serve)
            for stream in streams:
                await trio.testing.wait_all_tasks_blocked()
                counter.take(stream)  # type: ignore[arg-type]
                await trio.sleep(pause_s)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_peer_says_how_fast_bytes_came_and_closes_the_stream() -> None:
    slow, fast = Uploaded(1000, 0.01), Uploaded(10_000, 0.001)
    counted(slow, fast)
    assert slow.answer == pytest.approx(100_000, rel=0.01)
    assert fast.answer == pytest.approx(10_000_000, rel=0.01)
    assert slow.closed
    assert fast.closed


def test_an_upload_is_bounded_in_bytes_and_seconds() -> None:
    slow, fast = Uploaded(1000, 0.01), Uploaded(65536, 0.0001)
    counted(slow, fast)
    assert slow.received_bytes <= 1000 * MOST_S / 0.01
    assert fast.received_bytes == MOST_BYTES


def test_a_peer_that_does_not_take_its_answer_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, next_one = Uploaded(1000, 0.01), Uploaded(1000, 0.01)
    monkeypatch.setattr(deaf, "send_all", lambda _: trio.sleep_forever())
    counted(deaf, next_one)
    assert deaf.closed
    assert next_one.answer


def test_one_upload_is_counted_at_a_time() -> None:
    first, second, third = Uploaded(1000, 0.01), Uploaded(1000, 0.01), Uploaded(1000, 0.01)
    counted(first, second, third, pause_s=1.1)
    assert first.answer
    assert second.failed == "too many requests at once"
    assert not second.received_bytes
    assert third.answer is not None or third.received_bytes  # counted until the end of the test


def test_strangers_together_upload_so_much_a_minute() -> None:
    streams = [Uploaded(65536, 0.0001, remote=f"Qm{number}") for number in range(20)]
    counted(*streams, pause_s=3.0)
    most = MOST_BYTES_A_MINUTE * 2  # what it allows at once, and within the minute
    assert MOST_BYTES_A_MINUTE <= sum(stream.received_bytes for stream in streams) <= most
    assert all(stream.closed for stream in streams)


def test_what_a_slow_upload_leaves_is_given_back() -> None:
    streams = [Uploaded(1000, 0.01) for _ in range(20)]
    counted(*streams, pause_s=3.0)
    assert all(stream.answer for stream in streams)


def test_bytes_of_a_refused_peer_are_not_counted() -> None:
    refused, welcome = Uploaded(1000, 0.01, remote="QmBad"), Uploaded(1000, 0.01)
    counted(refused, welcome, refusal=lambda peer_id: "no" if peer_id == "QmBad" else None)
    assert refused.answer is None
    assert refused.closed
    assert not refused.received_bytes
    assert welcome.answer


@pytest.mark.processes
def test_the_rate_to_a_peer_on_this_machine(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            found = await upload_rate(second.transport.control_path, first.peer_id)
            assert found is not None
            assert found > 0

    run(main)


@pytest.mark.processes
def test_a_peer_that_does_not_measure_gives_no_rate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            monkeypatch.setattr(ways, "RATE", "p2ptrain/rate/0")
            assert await upload_rate(second.transport.control_path, first.peer_id) is None

    run(main)
