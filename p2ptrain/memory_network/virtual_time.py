"""Run a trio program in virtual time: waiting takes no real time, and every run with the same seed is the same."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import trio
import trio.testing

from p2ptrain.signals import interrupts_call

T = TypeVar("T")

# Thousands of tasks and tensors are created; Python's default thresholds would spend 5 % of the time (measured).
GC_THRESHOLD = (100_000, 50, 50)


def run_virtual(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run a trio program from time 0 on a clock that jumps to the next deadline whenever every task waits.

    Trio shuffles tasks that are ready at the same time. Here that is seeded, so a program is reproducible. In a
    p2ptrain command, the first Ctrl-C cancels the program, and this function then raises KeyboardInterrupt.
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

    # Trio has no public API for this.
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
        gc.collect(1)  # so that consecutive runs do not accumulate garbage
    if whole.cancel_called:
        raise KeyboardInterrupt
    return cast("T", result)
