"""Ctrl-C and SIGTERM: the first ends a command in good order, a second one at once, whatever it waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_on_signals() -> None:
    """From now on the first signal raises KeyboardInterrupt, and a second one ends the process at once.

    Only for the main thread, as Python demands. What was started to ignore SIGINT, as a shell's background jobs are,
    goes on ignoring it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


@contextmanager
def interrupts_call(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first signal that would raise KeyboardInterrupt calls `act` instead.

    For what an exception in the middle of anything would break, such as trio's own code. Where `interrupt_on_signals`
    was not called, as in a program that uses p2ptrain, signals stay what they are to that program.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _end_at_the_next()
        act()

    ours = [number for number in SIGNALS if signal.getsignal(number) is _interrupt]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is handle:
                signal.signal(number, _interrupt)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop. A second signal ends the process at once, also after the block.

    Only for the main thread, as Python demands.
    """
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        _end_at_the_next()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: received
    finally:
        if not received:
            for number, handler in before.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _end_at_the_next()
    raise KeyboardInterrupt


def _end_at_the_next() -> None:
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
