"""Ctrl-C, SIGTERM and a closed terminal: the first signal ends a command in good order, a later one at once.

Signals that follow the first within `TOGETHER_S` belong to it: a supervisor may send SIGTERM twice, and after Ctrl-C
both the terminal and a launcher, such as torchrun, send one. They must not cost the checkpoint that is being written.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Long enough for the main thread to leave a destructor; a signal that comes too early is sent once more.
AGAIN_S = 0.02
# Guess: launchers pass a signal on within a second, and a person who wants to wait no longer presses Ctrl-C again.
TOGETHER_S = 2.0


def interrupt_on_signals() -> None:
    """From now on the first signal raises KeyboardInterrupt, and a later one ends the process at once.

    Only for the main thread, as Python requires. A signal that the process was started to ignore, such as SIGINT for a
    background job of a shell, or SIGHUP by nohup, is still ignored.
    """
    _arm()
    before = sys.unraisablehook

    def hook(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        # Raised within a destructor, such as trio's, where Python drops exceptions.
        _arm()
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        with suppress(RuntimeError):  # the interpreter is ending
            again.start()

    sys.unraisablehook = hook


def _arm() -> None:
    for number in _heeded():
        signal.signal(number, _interrupt)


def _heeded() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interrupts_call(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first signal that would raise KeyboardInterrupt calls `act` instead.

    For code that an exception at an arbitrary place would break, such as trio's. Without an earlier call of
    `interrupt_on_signals`, as in a program that uses p2ptrain as a library, it does nothing.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _end_at_a_later_one()
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
def interrupt_held() -> Iterator[None]:
    """Within the block, a first signal waits: its handler is called at the end. One that comes later acts at once.

    For work that must not be done by half, such as changing weights: after an interrupt, a notebook goes on with the
    same objects. It takes milliseconds, longer only where it waits for other processes. Does nothing in threads other
    than the main one, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(number): handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    held: list[tuple[float, int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((monotonic(), number, frame))
        if held[-1][0] - held[0][0] >= TOGETHER_S:
            restore_and_handle()

    def restore_and_handle() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
        if held:
            _, first, frame = held[0]
            held.clear()
            handlers[first](first, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        restore_and_handle()


def interruptible(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result or raise its exception. A signal does not wait for it.

    Python handles signals between two instructions of the main thread. A call into native code, such as tokenizing a
    large text, is one instruction, and may take minutes. The thread ends with the process at the latest.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="p2ptrain-interruptible", daemon=True).start()
    return result.result()


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after a signal. A later one ends the process at once, also after the block.

    Only for the main thread, and for the same signals, as `interrupt_on_signals`.
    """
    received = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        _end_at_a_later_one()

    before = {number: signal.signal(number, handle) for number in _heeded()}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def ignore_signals() -> None:
    """From now on ignore them: this process is ending anyway, and has something to say before it does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _end_at_a_later_one()
    raise KeyboardInterrupt


def _end_at_a_later_one() -> None:
    first_s = monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if monotonic() - first_s >= TOGETHER_S:
            os._exit(128 + number)

    for number in _heeded():
        signal.signal(number, end)
