"""Calling hivemind's asyncio code from our trio code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import trio

T = TypeVar("T")


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
