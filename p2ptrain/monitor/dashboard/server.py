"""Serves the page with uvicorn during a `with` block, while a second thread updates it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.app import make_app
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.settings.peer_config import PageConfig

STOP_S = 3.0
# Bound on concurrent connections; a browser opens a few.
MOST_CONNECTIONS = 200


@contextmanager
def showing(state: PageState, page: PageConfig) -> Iterator[str]:
    """Serve the page until the block ends. Yields its address.

    Raises:
        ConfigError: the port is in use, or the address does not belong to this machine.
    """
    state.refresh()
    with _listen(page) as listener:
        config = uvicorn.Config(
            make_app(state, (page.host, *page.page_names)), log_config=None, access_log=False, lifespan="off",
            ws="none", limit_concurrency=MOST_CONNECTIONS, server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(config)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        threads = (
            threading.Thread(target=server.run, args=([listener],), name="p2ptrain-page", daemon=True),
            threading.Thread(target=state.run, name="p2ptrain-dashboard", daemon=True),
        )
        for thread in threads:
            thread.start()
        try:
            yield f"http://{_shown_host(page.host)}:{listener.getsockname()[1]}/"
        finally:
            state.closing.set()
            server.should_exit = True
            for thread in threads:
                thread.join(STOP_S)


def _listen(page: PageConfig) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(page.host, page.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {page.host}: {error.strerror or error}; give an address of this machine") from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve the page on {page.host}, port {page.port}: {error.strerror or error}; choose another port "
            "(0: any free one), or an address of this machine"
        ) from None
    return listener


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
