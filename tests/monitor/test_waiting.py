"""A command says what it waits for, and only while it waits."""

from __future__ import annotations

import queue
import threading
import types

import pytest

from p2ptrain.monitor import waiting
from p2ptrain.monitor.waiting import saying_what_for


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    lines: queue.Queue[str] = queue.Queue()
    logger = types.SimpleNamespace(info=lambda text, *values: lines.put(text % values))
    monkeypatch.setattr(waiting, "logger", logger)
    return lines


def test_a_long_wait_is_reported(said: queue.Queue[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.0)
    with saying_what_for("connecting", 60.0):
        assert said.get(timeout=30) == "connecting; this takes up to 60 s"


def test_nothing_is_printed_once_the_wait_is_over(said: queue.Queue[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 3600.0)
    with pytest.raises(OSError, match="unreachable"), saying_what_for("connecting", 60.0):
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        raise OSError("unreachable")
    for timer in timers:
        timer.join(30)
        assert not timer.is_alive()
    assert timers
    assert said.empty()
