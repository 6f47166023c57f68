"""Serves the page for `p2ptrain dashboard`, which only observes a run, or for a peer, which shows its own run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import listen, showing
from p2ptrain.monitor.waiting import saying_what_for
from p2ptrain.settings.peer_config import ENDPOINT, PageConfig, parse_endpoint
from p2ptrain.settings.table import Settings

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer

logger = logging.getLogger(__name__)

# First and longest wait between two attempts to connect.
AGAIN_S = (2.0, 30.0)
POLL_S = 0.5


def serve_dashboard(settings: Settings, *, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. While the run cannot be reached, the page shows why, and it is tried again.

    Raises:
        ConfigError: the page cannot be served.
        KeyboardInterrupt: Ctrl-C.
    """
    run_id = str(settings.values["run_id"])
    state = PageState(run_id)
    with showing(state, settings.page_config()) as url:
        say(f"run {run_id!r} is shown at {url}")
        logged, (wait_s, longest_s) = "", AGAIN_S
        while True:
            began_s = time.monotonic()
            try:
                _observe(settings, state, is_first=not logged)
            except ConfigError as error:
                state.trouble = f"{error}; trying again"
                if logged != state.trouble:
                    logged = state.trouble
                    logger.warning("%s", logged)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s) if time.monotonic() - began_s < longest_s else AGAIN_S[0]


def _observe(settings: Settings, state: PageState, *, is_first: bool) -> None:
    """Observe the run until the network fails. Raises ConfigError then, or if the run cannot be reached.

    `is_first`: no attempt has failed yet, so log what this one waits for.
    """
    from p2ptrain.peer.session import OPEN_TIMEOUT_S, NetworkSession  # imports hivemind, which is slow

    with ExitStack() as stack:
        with saying_what_for("connecting to the initial peers", OPEN_TIMEOUT_S) if is_first else nullcontext():
            # Read the settings each time: an address file may have changed.
            session = stack.enter_context(NetworkSession(settings.network_config().without_bulk))
        session.check_key(state.run_id)
        watch = session.watch(state.run_id)
        state.watch, state.trouble = watch, ""
        try:
            while session.network.failure is None:
                time.sleep(POLL_S)
            raise session.network.failure
        finally:
            state.watch = None
            watch.stop()


def take_port(endpoint: str, page: PageConfig, stack: ExitStack) -> Callable[[Peer], str]:
    """Take the port of the dashboard before the run is joined, so that a port in use is an error at once.

    Args:
        endpoint: `PORT` (on the host of `page`) or `HOST:PORT`; port 0 chooses a free one.
        page: the other settings of the page.
        stack: ends the page when it is closed.

    Returns:
        A function that serves a peer's dashboard there. It returns the address, with a token if other machines can
        reach it.

    Raises:
        ConfigError: `endpoint` is malformed, or cannot be listened on.
    """
    parsed = parse_endpoint(endpoint)
    if parsed is None:
        raise ConfigError(f"dashboard = {endpoint!r}: must be {ENDPOINT.text}")
    host, port = parsed
    page = dataclasses.replace(page, host=host if ":" in endpoint else page.host, port=port)
    listener = stack.enter_context(listen(page))

    def show(peer: Peer) -> str:
        watch = peer.watch()
        stack.callback(watch.stop)
        return stack.enter_context(showing(PageState(peer.run.run_id, watch), page, listener))

    return show
