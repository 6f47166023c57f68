"""The worker thread of a peer, at a lower priority: training comes first where cores are busy.

A snapshot and a landing take about 10 ms of the training thread at 25M parameters. On two busy cores with four peers
they waited twice to ten times as long for a core, mostly while worker threads encoded and hashed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import outcome
import trio

# Added to the nice value. Of a core that training and the worker thread both want, training gets nine tenths instead of
# half: the kernel's weights are 1024 and 110. So with one training thread for each core, the work of a round takes
# about five times as long as at the same priority, with many at most about ten times.
NICER = 10


class Worker:
    """A thread of its own that does one piece of work at a time, in order, at a lower priority than the main thread.

    Not one of trio's threads: a lowered priority stays, because raising it again takes privileges, and trio uses its
    threads for all that it runs, in guest mode also to wait for the network. A daemon thread: the interpreter's exit
    does not wait for it.
    """

    def __init__(self) -> None:
        self._slot = trio.CapacityLimiter(1)
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._closed = False
        threading.Thread(target=self._serve, name="p2ptrain-worker", daemon=True).start()

    async def run(self, work: Callable[..., Any], /, *args: Any) -> Any:
        """Run work in the thread, and return its result or raise its exception. As `trio.to_thread.run_sync`:

        Work that has begun is not cancelled. Its result is returned, and the cancellation comes at the next checkpoint.
        """
        async with self._slot:
            if self._closed:  # for what is asked of a peer that has ended
                return await trio.to_thread.run_sync(work, *args)
            task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

            def call() -> None:
                token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.capture(work, *args))

            self._calls.put(call)
            return await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    def close(self) -> None:
        """End the thread after the work that has begun. Call it in the thread that runs trio."""
        self._closed = True
        self._calls.put(None)

    def _serve(self) -> None:
        _lower_priority()
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds may be large


def _lower_priority() -> None:
    """Give this thread a lower priority than the process's main thread. Linux only: elsewhere threads share one."""
    if sys.platform == "linux":
        # A sandbox may forbid it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER))
