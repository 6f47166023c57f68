"""Virtual time: a trio program in which waiting costs nothing, and which runs the same way every time."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import trio
import trio.testing

from p2ptrain.signals import interrupts_call

T = TypeVar("T")

# Tasks and tensors come and go by the thousand; looking for cycles as often as Python does takes 5 % (measured).
GC_THRESHOLD = (100_000, 50, 50)


def run_virtual(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run a trio program from time 0 on a clock that jumps to the next deadline whenever every task waits.

    Trio shuffles tasks that are ready at once, so that nobody relies on their order; here its shuffling is seeded, so
    that the same program with the same seed does the same.

    In a command of ours, Ctrl-C cancels the program, as its end would, and is a KeyboardInterrupt to the caller.
    """
    whole = trio.CancelScope()

    def cancel() -> None:
        try:
            trio.lowlevel.current_trio_token().run_sync_soon(whole.cancel)
        except RuntimeError:  # trio does not run yet, or no longer
            whole.cancel()

    async def cancellable() -> T | None:
        with whole:
            return await main()
        return None

    # Trio offers this to test libraries by no public name.
    scheduler: Any = trio._core._run
    before, thresholds = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        with interrupts_call(cancel):
            result = trio.run(cancellable, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        gc.set_threshold(*thresholds)
        gc.collect(1)  # what was left lying about: one run after the other must not pile it up
    if whole.cancel_called:
        raise KeyboardInterrupt
    return cast("T", result)
