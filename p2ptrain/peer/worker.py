"""The worker threads of a peer, at a lower priority: training comes first where cores are busy.

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
from typing import Any, TypeVar

import outcome
import torch
import trio

from p2ptrain.settings.machine import usable_cores

T = TypeVar("T")

# More threads would wait for memory (guess).
MOST_THREADS = 8
# Added to the nice value. Of a core that training and a worker thread both want, training gets nine tenths instead of
# half: the kernel's weights are 1024 and 110. So with one training thread for each core, the work of a round takes
# about five times as long as at the same priority, with many at most about ten times.
NICER = 10


def default_threads() -> int:
    """Half of the cores that this process may use, as training uses all of them; at least 1, at most MOST_THREADS."""
    return max(1, min(MOST_THREADS, usable_cores() // 2))


class Workers:
    """Threads of their own that take pieces of work in order, at a lower priority than the main thread.

    Implements `Compute`. With one thread, one piece is done at a time; with several, pieces that are asked for at the
    same time run at the same time, so none may use what another one writes.

    These are not trio's threads, because a lowered priority stays: raising it again takes privileges, and trio uses its
    threads for other work too, in guest mode also to wait for the network. They are daemon threads, for which the exit
    of the interpreter does not wait.

    Attributes:
        threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._slots = trio.CapacityLimiter(threads)
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._closed = False
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"p2ptrain-worker-{number}", daemon=True).start()

    async def __call__(self, work: Callable[..., T], /, *args: Any) -> T:
        """Run work in a thread, and return its result or raise its exception. As `trio.to_thread.run_sync`:

        Work that has begun is not cancelled. Its result is returned, and the cancellation comes at the next checkpoint.
        """
        async with self._slots:
            if self._closed:  # the peer has ended
                return await trio.to_thread.run_sync(work, *args)
            task, token = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()

            def call() -> None:
                token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.capture(work, *args))

            self._calls.put(call)
            result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
            return result

    def close(self) -> None:
        """End the threads after the work that has begun. Call it in the thread that runs trio."""
        self._closed = True
        for _ in range(self.threads):
            self._calls.put(None)

    def _serve(self) -> None:
        _lower_priority()
        # A new thread inherits this from the one that made it; all peers must compute the same bits.
        torch.set_flush_denormal(False)
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds may be large


def _lower_priority() -> None:
    """Give this thread a lower priority than the process's main thread. Linux only: elsewhere threads share one."""
    if sys.platform == "linux":
        # A sandbox may forbid it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER))
