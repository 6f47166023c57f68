"""Awaiting asyncio coroutines from trio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import trio

from p2ptrain.network.bridge import from_asyncio


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
