"""Sinks: receivers of a peer's events, such as its metrics file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from p2ptrain.error_log import ErrorLog

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives a peer's events. Methods are called from any thread, and must neither block nor raise."""

    def write(self, event: str, /, **fields: Any) -> None:
        """Receive one event; docs/metrics.md lists their names and fields."""
        ...

    def close(self) -> None:
        """Called after the last event, maybe twice."""
        ...


class Sinks:
    """A sink that passes every event to the sinks that it owns. One that raises loses the event; logged once."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._errors = ErrorLog(logger)

    def write(self, event: str, /, **fields: Any) -> None:
        for sink in self._sinks:
            try:
                sink.write(event, **fields)
            except Exception as error:
                self._errors.note(f"{type(sink).__name__} has lost an event {event!r}", error)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._errors.note(f"{type(sink).__name__} was not closed", error)
