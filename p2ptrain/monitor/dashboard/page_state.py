"""The state of the page: what an observer sees of the run, as JSON for the browser; updated once per second."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from p2ptrain.error_log import ErrorLog
from p2ptrain.monitor.dashboard import snapshot
from p2ptrain.monitor.dashboard.snapshot import curves
from p2ptrain.monitor.swarmview import SwarmView

if TYPE_CHECKING:
    from p2ptrain.peer.watch import Watch

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
# Curves are large: computed on request, at most this often for each range. Browsers request them every 5 s.
CURVES_EVERY_S = 4.0


class PageState:
    """Keeps the latest values only. Any thread may call any method.

    Attributes:
        watch: observes the run, set by the owner of the connection; None without one.
        trouble: why there is no connection, for the user; "" if there is one.
        closing: set when the page ends.
    """

    def __init__(self, run_id: str, watch: Watch | None = None) -> None:
        self.run_id = run_id
        self.watch = watch
        self.trouble = "" if watch is not None else "Connecting to the run …"
        self.closing = threading.Event()
        self._errors = ErrorLog(logger)
        self._lock = threading.Lock()
        self._swarm = SwarmView()
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._version = 0
        self._curves: dict[int, tuple[float, bytes]] = {}

    def run(self) -> None:
        """Refresh until `closing`."""
        while not self.closing.wait(REFRESH_S):
            with self._errors.containing("updating the dashboard"):  # training must not be affected
                self.refresh()

    def refresh(self) -> None:
        """Get the latest view, and update all parts but the curves."""
        now_s, view = time.time(), None
        if (watch := self.watch) is not None:
            try:
                view = watch.take()
            except (RuntimeError, TimeoutError) as error:
                logger.debug("no news from the swarm: %s", error)
        with self._lock:
            if view is not None:
                self._swarm.observe(view, now_s)
            self._put("run", {"run_id": self.run_id, "trouble": self.trouble})
            self._put("overview", snapshot.overview(self._swarm, now_s))
            self._put("rounds", snapshot.rounds(self._swarm))
            self._put("notices", snapshot.notices(self._swarm))

    def since(self, version: int) -> list[tuple[int, str, bytes]]:
        """Version, name and value of the parts newer than `version`, oldest first."""
        with self._lock:
            return sorted((at, name, data) for name, (at, data) in self._parts.items() if at > version)

    def curves(self, range_s: int) -> bytes:
        """The curves of a time range, at most CURVES_EVERY_S old."""
        with self._lock:
            now_s = time.monotonic()
            drawn_s, data = self._curves.get(range_s, (-math.inf, b""))
            if now_s - drawn_s >= CURVES_EVERY_S:
                data = _json(curves(self._swarm, range_s, time.time()))
                self._curves[range_s] = (now_s, data)
            return data

    def _put(self, name: str, value: Any) -> None:
        """Set a part; an equal value does not change its version."""
        data = _json(value)
        if self._parts.get(name, (0, b""))[1] != data:
            self._version += 1
            self._parts[name] = (self._version, data)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
