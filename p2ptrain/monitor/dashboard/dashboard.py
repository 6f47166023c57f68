"""Keeps the page up to date: takes what is new of the swarm once a second, from a thread of its own."""

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


class Looking(Protocol):
    """A `Watch`, or what stands in for one."""

    def take(self) -> View: ...


class Source:
    """Where the page's swarm comes from; whoever connects to it says how that goes. Any thread may use it.

    Attributes:
        watch: looks at the run; None while there is no connection.
        trouble: why there is none, in words for people.
    """

    def __init__(self, run_id: str, watch: Looking | None = None) -> None:
        self.run_id = run_id
        self.watch = watch
        self.trouble = "" if watch is not None else "connecting"


@contextmanager
def showing(source: Source, page: PageConfig) -> Iterator[str]:
    """Serve the page until the block ends. Yields its address. Raises ConfigError when it cannot be served."""
    page_state = PageState()
    keeper = _Keeper(source, page_state)
    keeper.refresh()
    with serving(make_app(page_state, (page.host, *page.page_names)), page) as url:
        thread = threading.Thread(target=keeper.run, name="p2ptrain-dashboard", daemon=True)
        thread.start()
        try:
            yield url
        finally:
            page_state.closing = True
            keeper.ended.set()
            thread.join(REFRESH_S + 2.0)


class _Keeper:
    """Owns the view of the swarm."""

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
                # A page that stands still would say nothing of why; training must not notice either way.
                logger.exception("the page could not be brought up to date")

    def refresh(self) -> None:
        """Take what is new, and show it."""
        now_s = time.time()
        watch = self._source.watch
        if watch is not None:
            try:
                self._live.take(watch.take(), now_s)
            except (RuntimeError, TimeoutError) as error:
                logger.debug("nothing new of the swarm: %s", error)
        page_state = self._page_state
        page_state.put("run", {"run_id": self._source.run_id, "trouble": self._source.trouble})
        page_state.put("overview", snapshot.overview(self._live, now_s))
        page_state.put("rounds", snapshot.rounds(self._live))
        page_state.put("happenings", snapshot.happenings(self._live))
        for range_s in page_state.wanted():
            if now_s - self._drawn.get(range_s, 0.0) >= CURVES_EVERY_S:
                self._drawn[range_s] = now_s
                page_state.put_curves(range_s, curves(self._live, range_s, now_s))
