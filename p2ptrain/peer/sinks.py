"""Where a peer's events go: its metrics file, and whoever else looks on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from p2ptrain.error_log import ErrorLog

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes a peer's events. Both methods are called from any thread, and must neither block nor raise."""

    def write(self, event: str, /, **fields: Any) -> None:
        """Take one event; its name and fields are those of docs/metrics.md."""
        ...

    def close(self) -> None:
        """No more events come. May be called twice."""
        ...


class Sinks:
    """Gives every event to all of its sinks, in their order. It is a sink itself, and owns the others.

    A sink that raises loses that event; the others get it, and the bug is logged once.
    """

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
