"""The dashboard that a peer serves: it takes its port before the run is joined, and shows the peer once it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import listen, showing
from p2ptrain.peer.peer import Peer
from p2ptrain.settings.peer_config import ENDPOINT, PageConfig, parse_endpoint


def take_port(endpoint: str, page: PageConfig, stack: ExitStack) -> Callable[[Peer], str]:
    """Take the port of the dashboard, so that one in use is found before the run is joined.

    Args:
        endpoint: `PORT` (on the host of `page`) or `HOST:PORT`; port 0 chooses a free one.
        page: the other settings of the page.
        stack: ends the page when it is closed.

    Returns:
        What serves a peer's dashboard there, and gives its address, with a token if other machines can reach it.

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
