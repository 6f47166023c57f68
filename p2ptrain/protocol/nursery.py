"""Nurseries that raise a single exception, not a group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import PeerLostError, WireError

# Pieces requested at once from one peer, to hide the round trip (guess).
PIPELINE = 4


@asynccontextmanager
async def nursery_raising(*kinds: type[Exception]) -> AsyncIterator[trio.Nursery]:
    """A nursery that raises only the first of its exceptions of these kinds. A cancellation takes precedence."""
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except* kinds as errors:
        failure = innermost(errors)
    # Not in the block above: beside a cancellation it would become a group, which no `except` expects.
    if failure is not None:
        raise failure


async def fetch_pipelined(count: int, fetch: Callable[[int], Awaitable[None]]) -> None:
    """Fetch pieces 0 to `count` - 1 from one peer, `PIPELINE` at once. Raises the first PeerLostError or WireError."""
    indices = iter(range(count))

    async def fetch_some() -> None:
        for index in indices:
            await fetch(index)

    async with nursery_raising(PeerLostError, WireError) as nursery:
        for _ in range(PIPELINE):
            nursery.start_soon(fetch_some)
