"""Ctrl-C and SIGTERM as a question that a loop asks, instead of an exception that strikes anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether to stop. A second signal ends the process at once.

    Only for the main thread, as Python demands.
    """
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            os._exit(128 + number)
        received = True

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, for what waits where no loop can ask. In a container nothing else ends it.

    Only for the main thread, as Python demands.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
