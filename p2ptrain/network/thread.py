"""The background thread that runs all networking.

Its loop is asyncio's (uvloop if installed), which hivemind needs. Our own code is trio, which runs in guest mode on
that loop and awaits asyncio code by `from_asyncio`. The training thread uses `run`, `start_soon` and `post`, and never
waits for the network without a time limit.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

import trio

from p2ptrain.error_log import ErrorLog

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)

# How often a waiting thread looks after something else.
POLL_S = 0.05
# How long a cancelled call may take to clean up; ending a p2pd that ignores SIGTERM takes 2 s.
CANCEL_GRACE_S = 5.0
# How long the interpreter's exit may wait for sockets and processes to end.
EXIT_TIMEOUT_S = 8.0


@contextlib.asynccontextmanager
async def open_background() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled when the block ends.

    A plain nursery would wrap the block's exceptions in exception groups, which `except ConfigError` does not catch.
    An exception of a background task cancels the block and is raised as a group.
    """
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except BaseException as error:
            raised = error
        nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised


async def from_asyncio(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run an asyncio coroutine from trio in guest mode on the same thread's asyncio loop, and return its result.

    A trio cancellation cancels the asyncio task and waits until it has ended. If it still ended with a result, that
    is returned, so that resources it opened are not lost.

    Raises:
        ConnectionAbortedError: the coroutine was cancelled by asyncio code.
        Exception: anything that the coroutine raises.
    """
    waiter = trio.lowlevel.current_task()
    raise_cancelled: trio.lowlevel.RaiseCancelT | None = None
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(lambda _: trio.lowlevel.reschedule(waiter))

    def abort(raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        nonlocal raise_cancelled
        raise_cancelled = raise_cancel
        task.cancel()
        return trio.lowlevel.Abort.FAILED

    await trio.lowlevel.wait_task_rescheduled(abort)
    if not task.cancelled():
        return task.result()
    if raise_cancelled is not None:
        raise_cancelled()
    raise ConnectionAbortedError("cancelled by asyncio code")


class MonotonicClock(trio.abc.Clock):
    """A trio clock that reads `time.monotonic()`, so that the training thread can read the same time."""

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return time.monotonic()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - time.monotonic()


class NetworkThread:
    """A daemon thread that runs trio functions for other threads, from construction until `stop`.

    Public methods may be called from any other thread. The thread is stopped at interpreter exit at the latest.

    Attributes:
        failure: the first exception of a task given to `start_soon`, of a callable given to `post`, or that ended the
            thread; None if there was none. Each bug is also logged once.
        has_stopped: whether the thread runs nothing any more. If trio was abandoned, the next call notices it.
    """

    def __init__(self) -> None:
        """Start the thread and wait until it accepts work."""
        self.failure: BaseException | None = None
        self.has_stopped = False
        self._errors = ErrorLog(logger)
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._host, name="p2ptrain-network", daemon=True)
        self._thread.start()
        self._started.result()
        atexit.register(self.stop, EXIT_TIMEOUT_S)

    def run(
        self,
        async_fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        timeout_s: float,
        meanwhile: Callable[[], object] | None = None,
    ) -> T:
        """Run a trio function on the thread, wait for it, and return its result or raise its exception.

        `meanwhile` is called every `POLL_S`, for functions that wait for the calling thread. What it raises cancels the
        function, and is raised.

        Raises:
            TimeoutError: it took longer than `timeout_s`, and was cancelled.
            KeyboardInterrupt: Ctrl-C arrived while waiting; the function was cancelled.
            RuntimeError: the thread has stopped.
        """
        assert threading.current_thread() is not self._thread, "it would wait for itself"
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        scope = trio.CancelScope()
        self._pending.add(future)
        try:
            if not self._soon(lambda: self._nursery.start_soon(self._run_one, async_fn, args, scope, future)):
                future.set_exception(RuntimeError("the network thread has stopped"))
            deadline = time.monotonic() + timeout_s
            while meanwhile is not None and time.monotonic() < deadline:
                meanwhile()
                if concurrent.futures.wait([future], POLL_S).done:
                    break
            if not concurrent.futures.wait([future], max(0.0, deadline - time.monotonic())).done:
                raise TimeoutError(f"the network thread was not done within {timeout_s:g} s")
            return future.result()
        except BaseException:
            if not future.done():
                self.post(scope.cancel)
                concurrent.futures.wait([future], CANCEL_GRACE_S)
            raise
        finally:
            self._pending.discard(future)

    def start_soon(self, async_fn: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start a trio task in the thread's root nursery. Its errors are recorded; other tasks go on."""
        self.post(lambda: self._nursery.start_soon(self._run_recorded, async_fn, args))

    def post(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the thread soon, in order of posting. Does nothing once the thread has stopped."""
        self._soon(fn)

    def stop(self, timeout_s: float) -> bool:
        """Cancel all tasks and wait for the thread to end; returns whether it has. May be called again."""
        assert threading.current_thread() is not self._thread, "it would wait for itself"
        atexit.unregister(self.stop)
        self.post(lambda: self._nursery.cancel_scope.cancel())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _soon(self, fn: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(self._call_recorded, fn)
        except (trio.RunFinishedError, OSError):  # an OSError: trio was abandoned when it could start no thread
            self.has_stopped = True
            return False
        return True

    # On the thread itself.

    def _host(self) -> None:
        loop = _new_event_loop()
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(_log_asyncio_error)
        finished: asyncio.Future[Any] = loop.create_future()
        try:
            trio.lowlevel.start_guest_run(
                self._main,
                run_sync_soon_threadsafe=loop.call_soon_threadsafe,
                run_sync_soon_not_threadsafe=loop.call_soon,
                done_callback=finished.set_result,
                host_uses_signal_set_wakeup_fd=True,
                clock=MonotonicClock(),
            )
            loop.run_until_complete(finished).unwrap()
        except BaseException as error:
            self._record(error)
        finally:
            self.has_stopped = True
            with contextlib.suppress(Exception):
                loop.run_until_complete(_end_asyncio_tasks())
            loop.close()
            for future in [self._started, *self._pending]:
                if not future.done():
                    future.set_exception(RuntimeError("the network thread has stopped"))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            self._started.set_result(None)
            await trio.sleep_forever()

    async def _run_one(
        self,
        async_fn: Callable[..., Awaitable[T]],
        args: tuple[Any, ...],
        scope: trio.CancelScope,
        future: concurrent.futures.Future[T],
    ) -> None:
        with scope:
            try:
                result = await async_fn(*args)
            except BaseException as error:
                if isinstance(error, trio.Cancelled):
                    future.set_exception(RuntimeError("cancelled: the network thread stops"))
                    raise
                future.set_exception(error)
            else:
                future.set_result(result)

    async def _run_recorded(self, async_fn: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        try:
            await async_fn(*args)
        except* Exception as group:
            self._record(group.exceptions[0] if len(group.exceptions) == 1 else group)

    def _call_recorded(self, fn: Callable[[], object]) -> None:
        try:
            fn()
        except Exception as error:
            self._record(error)

    def _record(self, error: BaseException) -> None:
        self._errors.note("a task of the network thread failed", error)
        self.failure = self.failure or error


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _log_asyncio_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Calls to a lost daemon cause them, and asyncio's own handler would print them to the user's terminal. No
    # traceback: this runs during garbage collection, and printing one parses code, which Python 3.11 may be doing
    # already.
    logger.debug("asyncio: %s: %r", context.get("message"), context.get("exception"))


async def _end_asyncio_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
