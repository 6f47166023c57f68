"""A nursery that fails with one exception, not with a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from p2ptrain.error_log import innermost


@asynccontextmanager
async def nursery_raising(*kinds: type[Exception]) -> AsyncIterator[trio.Nursery]:
    """A nursery whose exceptions of these kinds end it as one: the first. A cancellation comes before them."""
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except* kinds as errors:
        failure = innermost(errors)
    # Not above: raised beside a cancellation it would become a group, which no `except` expects.
    if failure is not None:
        raise failure
