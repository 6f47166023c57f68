"""Serves the page and updates it once per second, from its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from p2ptrain.monitor.dashboard import snapshot
from p2ptrain.monitor.dashboard.app import make_app
from p2ptrain.monitor.dashboard.curves import curves
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import serving
from p2ptrain.monitor.liveswarm import LiveSwarm
from p2ptrain.protocol.event_log.observer import View
from p2ptrain.settings.peer_config import PageConfig

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
CURVES_EVERY_S = 4.0


class Observing(Protocol):
    """A `Watch`, or a test double."""

    def take(self) -> View: ...


class Source:
    """The source of the page's data, set by the owner of the connection. Any thread may use it.

    Attributes:
        watch: observes the run; None without a connection.
        trouble: why there is no connection, for the user; "" if there is one.
    """

    def __init__(self, run_id: str, watch: Observing | None = None) -> None:
        self.run_id = run_id
        self.watch = watch
        self.trouble = "" if watch is not None else "connecting"


@contextmanager
def showing(source: Source, page: PageConfig) -> Iterator[str]:
    """Serve the page until the block ends. Yields its address. Raises ConfigError when it cannot be served."""
    page_state = PageState()
    updater = _Updater(source, page_state)
    updater.refresh()
    with serving(make_app(page_state, (page.host, *page.page_names)), page) as url:
        thread = threading.Thread(target=updater.run, name="p2ptrain-dashboard", daemon=True)
        thread.start()
        try:
            yield url
        finally:
            page_state.closing = True
            updater.ended.set()
            thread.join(REFRESH_S + 2.0)


class _Updater:
    """Owns the view of the swarm and updates the page."""

    def __init__(self, source: Source, page_state: PageState) -> None:
        self.ended = threading.Event()
        self._source = source
        self._page_state = page_state
        self._live = LiveSwarm()
        self._drawn: dict[int, float] = {}

    def run(self) -> None:
        """Refresh until `ended`."""
        while not self.ended.wait(REFRESH_S):
            try:
                self.refresh()
            except Exception:
                # Log why the page stops updating; training must not be affected.
                logger.exception("updating the dashboard failed")

    def refresh(self) -> None:
        """Get the latest view, and update the page."""
        now_s = time.time()
        watch = self._source.watch
        if watch is not None:
            try:
                self._live.take(watch.take(), now_s)
            except (RuntimeError, TimeoutError) as error:
                logger.debug("no news from the swarm: %s", error)
        page_state = self._page_state
        page_state.put("run", {"run_id": self._source.run_id, "trouble": self._source.trouble})
        page_state.put("overview", snapshot.overview(self._live, now_s))
        page_state.put("rounds", snapshot.rounds(self._live))
        page_state.put("notices", snapshot.notices(self._live))
        for range_s in page_state.wanted():
            if now_s - self._drawn.get(range_s, 0.0) >= CURVES_EVERY_S:
                self._drawn[range_s] = now_s
                page_state.put_curves(range_s, curves(self._live, range_s, now_s))
