"""Runs long work in pieces, on several worker threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from p2ptrain.protocol.wire.transport import Compute

P = TypeVar("P")
T = TypeVar("T")


async def in_parallel(compute: Compute, work: Callable[[P], T], pieces: Iterable[P]) -> list[T]:
    """Run `work` on each piece, on at most `compute.threads` threads. Returns the results in the order of the pieces.

    Results do not depend on the number of threads, as long as no piece uses what another one writes.

    Pieces begin in their order. All that have begun have ended when this returns, raises or is cancelled. If pieces
    raise, no others begin, and the error of the first of them is raised.
    """
    left, results, errors = deque(enumerate(pieces)), dict[int, T](), dict[int, Exception]()

    def work_through() -> None:
        while True:
            try:
                number, piece = left.popleft()  # one thread gets it
            except IndexError:
                return
            try:
                results[number] = work(piece)
            except Exception as error:
                errors[number] = error
                left.clear()

    async def use_a_thread() -> None:
        try:
            await compute(work_through)
        finally:
            left.clear()  # when cancelled; else nothing is left

    count = len(left)
    if min(count, compute.threads) == 1:
        await use_a_thread()
    else:
        async with trio.open_nursery() as nursery:
            for _ in range(min(count, compute.threads)):
                nursery.start_soon(use_a_thread)
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(count)]
