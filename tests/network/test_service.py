"""A service handles so many streams at once, whatever happens to each."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from p2ptrain.errors import PeerLostError
from p2ptrain.network.socket_stream import Service


class Opened:
    """A stream that another peer has opened."""

    remote = "QmA"

    def __init__(self) -> None:
        self.closed, self.failed = False, ""

    async def aclose(self) -> None:
        self.closed = True

    def fail(self, reason: str) -> None:
        self.failed = reason


async def wait(stream: Any) -> None:
    await trio.sleep(1)


async def lose(stream: Any) -> None:
    raise PeerLostError("it went away")


async def break_down(stream: Any) -> None:
    raise LookupError("a bug of ours")


async def hang(stream: Any) -> None:
    with trio.fail_after(1):
        await trio.sleep_forever()


@pytest.mark.parametrize("handle", [wait, lose, break_down, hang])
def test_more_streams_than_the_limit_are_refused_and_places_come_back(handle: Any) -> None:
    async def main() -> None:
        service, streams = Service("testing", 2), [Opened() for _ in range(6)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.serve)
            for begin in (0, 3):
                for stream in streams[begin : begin + 3]:
                    service.take(stream, handle)  # type: ignore[arg-type]
                await trio.sleep(2)
            nursery.cancel_scope.cancel()
        assert [stream.failed for stream in streams] == 2 * ["", "", "too many requests at once"]
        assert [stream.closed for stream in streams] == 2 * [True, True, False]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_streams_that_wait_or_are_handled_when_it_stops_give_their_places_back() -> None:
    async def main() -> None:
        service, streams = Service("testing", 2), [Opened() for _ in range(3)]
        for _ in range(2):
            with trio.move_on_after(0.5):
                for stream in streams:
                    service.take(stream, wait)  # type: ignore[arg-type]
                await service.serve()
        service.take(streams[0], wait)  # type: ignore[arg-type]
        with trio.move_on_after(2):
            await service.serve()
        assert service._taken.total() == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_lost_peer_is_normal_and_a_bug_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        service = Service("testing", 2)
        with trio.move_on_after(1):
            service.take(Opened(), lose)  # type: ignore[arg-type]
            service.take(Opened(), break_down)  # type: ignore[arg-type]
            await service.serve()

    with caplog.at_level(logging.INFO):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    (record,) = caplog.records
    assert "testing" in record.message


def test_one_peer_has_few_of_the_places() -> None:
    async def main() -> None:
        service = Service("waiting", 4, limit_of_peer=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.serve)
            greedy, other = [Opened() for _ in range(4)], Opened()
            other.remote = "QmB"
            for stream in (*greedy, other):
                service.take(stream, wait)  # type: ignore[arg-type]
            assert [bool(stream.failed) for stream in (*greedy, other)] == [False, False, True, True, False]
            await trio.sleep(2)
            service.take(last := Opened(), wait)  # type: ignore[arg-type]
            assert not last.failed
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
