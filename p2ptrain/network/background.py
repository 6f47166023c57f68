"""Background tasks of a block whose own exceptions stay what they are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio


@contextlib.asynccontextmanager
async def open_background() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled at the end of the block, however that ends.

    A plain nursery wraps the block's exceptions in exception groups, and then nobody who wrote `except ConfigError`
    around five nested blocks would catch one. What a background task raises cancels the block and does come as a group.
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
