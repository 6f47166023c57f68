"""The network thread: work from other threads, failures, stopping, and asyncio coroutines awaited from trio tasks."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from p2ptrain.network.thread import NetworkThread, from_asyncio


@pytest.fixture
def own() -> Iterator[NetworkThread]:
    """A thread that the test may break."""
    thread = NetworkThread()
    yield thread
    assert thread.stop(10.0)


def test_run_gives_result_and_exception(own: NetworkThread) -> None:
    async def double(value: int) -> int:
        await trio.lowlevel.checkpoint()
        return 2 * value

    async def fail() -> None:
        raise LookupError("no such thing")

    assert own.run(double, 21, timeout_s=60.0) == 42
    with pytest.raises(LookupError, match="no such thing"):
        own.run(fail, timeout_s=60.0)
    assert own.failure is None


def test_run_that_takes_too_long_is_cancelled(own: NetworkThread) -> None:
    cleaned_up = threading.Event()

    async def never() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned_up.set()

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        own.run(never, timeout_s=0.05)
    assert cleaned_up.is_set()


def test_timeout_error_of_the_function_is_its_own(own: NetworkThread) -> None:
    async def fail() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        own.run(fail, timeout_s=60.0)


def test_ctrl_c_cancels_what_is_waited_for(own: NetworkThread) -> None:
    cleaned_up = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    async def never() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await trio.sleep_forever()
        finally:
            cleaned_up.set()

    with pytest.raises(KeyboardInterrupt):
        own.run(never, timeout_s=30.0)
    assert cleaned_up.is_set()


def test_failing_task_is_recorded_and_the_others_live_on(own: NetworkThread) -> None:
    ticks: list[int] = []
    ticking = threading.Event()

    async def tick() -> None:
        while True:
            ticks.append(1)
            ticking.set()
            await trio.sleep(0.001)

    async def fail() -> None:
        raise OSError("first")

    own.start_soon(tick)
    own.start_soon(fail)
    own.run(trio.sleep, 0.01, timeout_s=60.0)
    assert isinstance(own.failure, OSError)
    ticking.clear()
    assert ticking.wait(60.0)


def test_post_keeps_order_and_survives_a_failing_callable(own: NetworkThread) -> None:
    seen: list[int] = []
    for value in range(5):
        own.post(lambda value=value: seen.append(value))
    own.post(lambda: [][1])
    own.run(trio.lowlevel.checkpoint, timeout_s=60.0)
    assert seen == [0, 1, 2, 3, 4]
    assert isinstance(own.failure, IndexError)


def test_stop_lets_tasks_clean_up_and_may_be_repeated() -> None:
    thread = NetworkThread()
    events: list[str] = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            events.append("cleaned up")

    thread.start_soon(work)
    thread.run(trio.lowlevel.checkpoint, timeout_s=60.0)
    assert thread.stop(60.0)
    assert thread.stop(60.0)
    assert events == ["cleaned up"]
    assert thread.failure is None
    with pytest.raises(RuntimeError, match="has stopped"):
        thread.run(trio.lowlevel.checkpoint, timeout_s=60.0)
    thread.post(events.clear)
    assert events


def test_stop_ends_a_run_that_another_thread_waits_for() -> None:
    thread = NetworkThread()
    outcomes: list[BaseException] = []
    started = threading.Event()

    async def wait() -> None:
        started.set()
        await trio.sleep_forever()

    def waiter() -> None:
        try:
            thread.run(wait, timeout_s=30.0)
        except BaseException as error:
            outcomes.append(error)

    other = threading.Thread(target=waiter)
    other.start()
    assert started.wait(60.0)
    assert thread.stop(60.0)
    other.join(60.0)
    assert [type(error) for error in outcomes] == [RuntimeError]


def test_clock_is_time_monotonic(own: NetworkThread) -> None:
    async def now() -> float:
        return trio.current_time()

    before = time.monotonic()
    assert before <= own.run(now, timeout_s=60.0) <= time.monotonic()


def test_works_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    thread = NetworkThread()

    async def loop_module() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert thread.run(loop_module, timeout_s=60.0).startswith("asyncio.")
    assert thread.stop(60.0)


def test_result_and_exception_pass(run: Callable[..., Any]) -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    async def fail() -> None:
        raise LookupError("asyncio side")

    async def main() -> None:
        assert await from_asyncio(add(2, 3)) == 5
        with pytest.raises(LookupError, match="asyncio side"):
            await from_asyncio(fail())

    run(main)


def test_trio_cancellation_cancels_the_asyncio_task(run: Callable[..., Any]) -> None:
    events: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            events.append("cleaned up")
            raise

    async def main() -> None:
        with trio.move_on_after(0.01) as scope:
            await from_asyncio(forever())
        assert scope.cancelled_caught
        assert events == ["cleaned up"]

    run(main)


def test_result_is_not_lost_when_cancellation_comes_too_late(run: Callable[..., Any]) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "opened"
        return "never"

    async def main() -> None:
        with trio.move_on_after(0.01):
            assert await from_asyncio(stubborn()) == "opened"

    run(main)


def test_cancellation_on_the_asyncio_side_is_an_error_here(run: Callable[..., Any]) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(ConnectionAbortedError):
            await from_asyncio(cancelled())

    run(main)
