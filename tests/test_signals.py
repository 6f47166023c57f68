"""Signals: the first asks, a later one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from p2ptrain import signals
from p2ptrain.signals import (
    SIGNALS,
    TOGETHER_S,
    interrupt_held,
    interrupt_on_signals,
    interruptible,
    stop_on_signals,
)


@pytest.fixture(autouse=True)
def not_started_by_nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with stop_on_signals() as stop:
        assert not stop()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_that_come_together_are_one(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher sends SIGTERM twice, or passes on the Ctrl-C that its terminal has sent to all processes."""
    now_s, ended = 100.0, list[int]()
    monkeypatch.setattr(signals, "monotonic", lambda: now_s)
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            now_s += 0.6
            os.kill(os.getpid(), number)
        assert ended == []
        now_s = 100.0 + TOGETHER_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [143]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_signal_that_comes_within_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what `__del__` raises, and with it the interrupt."""

    class Object:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        interrupt_on_signals()
        with pytest.raises(KeyboardInterrupt):
            Object()
            threading.Event().wait(20.0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


ASKED = """
with stop_on_signals():
    os.kill(os.getpid(), signal.SIGINT)
    print('still here', flush=True)
    os.kill(os.getpid(), signal.SIGINT)
print('too far')
"""
ON_THE_WAY_OUT = """
with stop_on_signals():
    os.kill(os.getpid(), signal.SIGINT)
print('still here', flush=True)
os.kill(os.getpid(), signal.SIGINT)
print('too far')
"""
WHILE_IT_CLEANS_UP = """
interrupt_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print('still here', flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print('too far')
"""


@pytest.mark.processes
@pytest.mark.parametrize("program", [ASKED, ON_THE_WAY_OUT, WHILE_IT_CLEANS_UP])
def test_a_later_signal_ends_the_process(program: str) -> None:
    imports = (
        "import os, signal\n"
        "from p2ptrain import signals\n"
        "from p2ptrain.signals import interrupt_on_signals, stop_on_signals\n"
        "signals.TOGETHER_S = 0\n"
    )
    program = f"{imports}{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == "still here\n"


IN_VIRTUAL_TIME = """
async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await trio.sleep(1)
        finally:
            print('cleans up', flush=True)

interrupt_on_signals()
try:
    run_virtual(main, seed=0)
except KeyboardInterrupt:
    print('still here', flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print('too far')
"""


@pytest.mark.processes
def test_a_program_in_virtual_time_is_cancelled_and_a_later_signal_ends_the_process() -> None:
    imports = (
        "import os, signal, trio\n"
        "from p2ptrain import signals\n"
        "from p2ptrain.signals import interrupt_on_signals\n"
        "from p2ptrain.memory_network.virtual_time import run_virtual\n"
        "signals.TOGETHER_S = 0\n"
    )
    program = f"{imports}{IN_VIRTUAL_TIME}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleans up\nstill here\n", "")


def test_what_was_started_to_ignore_ctrl_c_goes_on_doing_so() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_on_signals()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_does_not_wait_for_native_code() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait()
        ended.set()

    try:
        interrupt_on_signals()
        with pytest.raises(KeyboardInterrupt):
            interruptible(work)
        assert not ended.is_set()
    finally:
        release.set()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.wait(60)


def test_what_is_interruptible_gives_its_result_or_its_error() -> None:
    assert interruptible(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_an_interrupt_that_is_held_is_raised_at_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), False
    with pytest.raises(KeyboardInterrupt):
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def _as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_as_before")
def test_sigterm_is_held_too_where_it_would_raise() -> None:
    interrupt_on_signals()
    done = False
    with pytest.raises(KeyboardInterrupt):
        with interrupt_held():
            signal.raise_signal(signal.SIGTERM)
            done = True
    assert done


@pytest.mark.usefixtures("_as_before")
def test_a_later_signal_acts_at_once_also_while_one_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, done = 0.0, False
    monkeypatch.setattr(signals, "monotonic", lambda: now_s)
    with pytest.raises(KeyboardInterrupt):
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            now_s = signals.TOGETHER_S
            signal.raise_signal(signal.SIGINT)
            done = True
    assert not done


@pytest.mark.usefixtures("_as_before")
def test_after_a_signal_that_was_held_a_later_one_still_ends_the_process() -> None:
    with stop_on_signals() as stopped:
        with interrupt_held():
            signal.raise_signal(signal.SIGTERM)
            assert not stopped()
        assert stopped()
        at_a_later_one = signal.getsignal(signal.SIGINT)
        with interrupt_held():
            pass
        assert signal.getsignal(signal.SIGINT) is at_a_later_one


@pytest.mark.usefixtures("_as_before")
def test_an_interrupt_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt_held():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_hold_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[object]()
    assert callable(before)

    def other() -> None:
        with interrupt_held():  # would raise ValueError if it touched a handler
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]
