"""Where a peer's events go: its metrics file, and whoever else looks on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Takes a peer's events. Both methods are called from any thread, and must neither block nor raise."""

    def write(self, event: str, /, **fields: Any) -> None:
        """Take one event; its name and fields are those of docs/metrics.md."""
        ...

    def close(self) -> None:
        """No more events come. May be called twice."""
        ...


class Sinks:
    """Gives every event to all of its sinks, in their order. It is a sink itself, and owns the others."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: str, /, **fields: Any) -> None:
        for sink in self._sinks:
            sink.write(event, **fields)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
