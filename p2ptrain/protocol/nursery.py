"""A nursery that raises a single exception, not a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from p2ptrain.error_log import innermost


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
