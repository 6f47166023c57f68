"""A sink that fails loses its own events; the other sinks and the caller go on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from p2ptrain.peer.sinks import Sinks


class Kept:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.closed = False

    def write(self, event: str, /, **fields: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def write(self, event: str, /, **fields: Any) -> None:
        raise ZeroDivisionError("in a sink")

    def close(self) -> None:
        raise ZeroDivisionError("at the end")


def test_a_broken_sink_is_logged_once_and_the_others_get_everything(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Kept(), Kept()
    sinks = Sinks([before, Broken(), after])
    for _ in range(5):
        sinks.write("step", loss=1.0)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "Broken has lost an event 'step': ZeroDivisionError('in a sink'); please report this"
    ]
    sinks.close()
    for sink in (before, after):
        assert sink.events == ["step"] * 5
        assert sink.closed
