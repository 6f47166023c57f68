"""Background tasks for a block of code, without wrapping the block's exceptions in groups."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio


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
