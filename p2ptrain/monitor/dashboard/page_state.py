"""The state of the page, shared by the updating thread and the server: only the latest values, no queue."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

# Curves of a range are computed for this long after the last request; browsers request them every 5 s.
WANTED_S = 15.0


class PageState:
    """Parts of the page by name, each as JSON with a version. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._version = 0
        self._curves: dict[int, bytes] = {}
        self._wanted: dict[int, float] = {}
        self.closing = False

    def put(self, name: str, value: Any) -> None:
        """Set a part of the page; an equal value does not change its version."""
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        with self._lock:
            if self._parts.get(name, (0, b""))[1] != data:
                self._version += 1
                self._parts[name] = (self._version, data)

    def since(self, version: int) -> list[tuple[int, str, bytes]]:
        """Version, name and value of the parts newer than `version`, oldest first."""
        with self._lock:
            return sorted((at, name, data) for name, (at, data) in self._parts.items() if at > version)

    # --- curves are large: computed only on request -------------------------------------------------------------------

    def want_curves(self, range_s: int) -> bytes | None:
        """Request the curves of a range. Returns None until they are ready; they are updated for WANTED_S from now."""
        with self._lock:
            self._wanted[range_s] = time.monotonic()
            return self._curves.get(range_s)

    def wanted(self) -> list[int]:
        """The ranges requested within WANTED_S; drops the curves of other ranges."""
        with self._lock:
            now = time.monotonic()
            self._wanted = {range_s: at for range_s, at in self._wanted.items() if now - at < WANTED_S}
            self._curves = {range_s: data for range_s, data in self._curves.items() if range_s in self._wanted}
            return list(self._wanted)

    def put_curves(self, range_s: int, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        with self._lock:
            self._curves[range_s] = data
