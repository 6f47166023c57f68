"""The border between trio, in which everything of ours is written, and asyncio, in which hivemind is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import trio

T = TypeVar("T")


async def from_asyncio(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run an asyncio coroutine to its end from trio code that is a guest of the same thread's asyncio loop.

    A trio cancellation cancels the asyncio task and waits until it has ended. If it ended with a result all the same,
    that is returned, so that nothing it has opened is lost.

    Returns:
        What the coroutine returns.

    Raises:
        ConnectionAbortedError: the coroutine was cancelled on its asyncio side.
        Exception: whatever the coroutine raises.
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
