"""Sinks: receivers of a peer's events, such as its metrics file, which has one JSON object per line.

The event names and fields are public (docs/use/metrics.md): add, never rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError

logger = logging.getLogger(__name__)

# How many lines may wait for the disk. When there are more, the newest are lost, and that is logged.
MAX_WAITING = 10_000
# How long lines of steps may wait, to be written together: waking the thread for each costs 0.08 ms of CPU (measured).
REST_S = 0.5
# The longest line, a `sample` of 512 weights, takes 12 kB.
MAX_LINE_BYTES = 1024 * 1024
# How long closing waits for the disk (guess).
CLOSE_TIMEOUT_S = 5.0
# Limits of a value in a user's own event for which JSON has no form.
MAX_DEPTH, MAX_TEXT = 4, 200


class Sink(Protocol):
    """Receives a peer's events. Methods are called from any thread, and must neither block nor raise."""

    def write(self, event: str, /, **fields: Any) -> None:
        """Receive one event; docs/use/metrics.md lists their names and fields."""
        ...

    def close(self) -> None:
        """Called after the last event, maybe twice."""
        ...


class Sinks:
    """Passes every event to the sinks that it owns. One that raises loses the event, which is logged once."""

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


class MetricsFile:
    """Appends events to a file in a background thread. `write` may be called from any thread and never blocks.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            # Unbuffered: the rest of a line that a full disk refused must not be written later, without its beginning.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--metrics {path}: cannot be written ({error.strerror}); choose another file") from None
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._lost = 0
        self._urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-metrics", daemon=True)
        self._thread.start()

    def write(self, event: str, /, **fields: Any) -> None:
        """Queue one event; `t` (seconds since the epoch) is added."""
        try:
            self._queue.put_nowait({"event": event, "t": round(time.time(), 3), **fields})
            if event != "step":
                self._urgent.set()
        except queue.Full:
            self._lose("the disk does not keep up")

    def close(self) -> None:
        """Write the queued events and close the file. Blocks for up to 5 s. May be called twice."""
        if self._thread.is_alive():
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            with contextlib.suppress(queue.Full):  # a disk that hangs
                self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            self._urgent.set()
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        with self._file:
            while (event := self._queue.get()) is not None:
                try:
                    self._append(_encode(event))
                except Exception as error:  # a full disk, or a value that cannot be read
                    self._lose(getattr(error, "strerror", None) or repr(error))
                else:
                    self._note_written()
                if self._queue.empty():
                    self._urgent.wait(REST_S)
                    self._urgent.clear()

    def _append(self, line: bytes) -> None:
        """Write a line, all or nothing. Raises OSError."""
        written = self._file.write(line)
        if written < len(line):  # the disk is full
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lose(self, reason: str) -> None:
        if self._lost == 0:
            logger.error("metrics are being lost: %s; training goes on", reason)
        self._lost += 1

    def _note_written(self) -> None:
        if self._lost:
            logger.warning("metrics are written again; %d lines were lost", self._lost)
            self._lost = 0


def _cut_unfinished_line(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process, so that the next line does not continue it."""
    if path.is_file():
        with path.open("r+b") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            tail_bytes = min(size_bytes, MAX_LINE_BYTES)
            file.seek(size_bytes - tail_bytes)
            file.truncate(size_bytes - tail_bytes + file.read().rfind(b"\n") + 1)


def _encode(event: dict[str, Any]) -> bytes:
    """One line of JSON. Values for which it has no form become null (NaN, infinity) or text (a user's own object)."""
    try:
        text = json.dumps(event, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(event, 0), allow_nan=False)
    return text.encode() + b"\n"


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if depth < MAX_DEPTH and isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < MAX_DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if depth < MAX_DEPTH and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        return _plain(value.item(), depth + 1)
    return _text(value)


def _text(value: object) -> str:
    try:
        return repr(value)[:MAX_TEXT]
    except Exception:  # a user's own object
        return f"<{type(value).__name__}>"
