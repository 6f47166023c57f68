"""Serves the page with uvicorn, from its own thread, during a `with` block."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from p2ptrain.errors import ConfigError
from p2ptrain.settings.peer_config import PageConfig

logger = logging.getLogger(__name__)

STOP_S = 3.0
# Bound on concurrent connections; a browser opens a few.
MOST_CONNECTIONS = 200


@contextmanager
def serving(app: ASGIApp, page: PageConfig) -> Iterator[str]:
    """Serve `app` until the block ends. Yields the URL for a browser.

    Raises:
        ConfigError: the port is in use, or the address does not belong to this machine.
    """
    listener = _listen(page)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", limit_concurrency=MOST_CONNECTIONS,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    thread = threading.Thread(target=server.run, args=([listener],), name="p2ptrain-page", daemon=True)
    thread.start()
    try:
        yield f"http://{_shown_host(page.host)}:{port}/"
    finally:
        server.should_exit = True
        thread.join(STOP_S)
        listener.close()


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
