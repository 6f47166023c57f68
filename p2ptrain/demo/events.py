"""Reads a peer's metrics file while the peer writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.protocol.event_log.events import Event


class EventReader:
    """Returns the events that were appended to a metrics file since the last call; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_events(self) -> Iterator[Event]:
        """The new events. An incomplete last line is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
