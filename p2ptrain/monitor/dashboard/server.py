"""Serves the page with uvicorn: static files, curves on request, all other state as server-sent events.

The page is read-only and loads nothing from other hosts. It answers requests for addresses of this machine, but not
for unknown host names: otherwise a foreign web page could read it (DNS rebinding). If other machines can reach it, a
browser needs its token: the address that `showing` yields contains it, and the first request turns it into a cookie.

uvicorn neither limits the time of a request's head nor makes room for new connections, so a few hundred clients that
send half a request would lock out every browser. Here each request has a deadline, and when all places are taken, the
connection that has waited longest without a whole request is closed for a new one.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.snapshot import RANGES
from p2ptrain.network.process_lifetime import close_everywhere
from p2ptrain.settings.peer_config import PageConfig

STATIC = Path(__file__).parent / "static"
LOOK_S = 0.25
# Interval of keep-alive comments, which reveal dead connections.
ALIVE_S = 15.0
# Bound on concurrent event streams.
MOST_STREAMS = 32
# A browser opens six connections, and sends its request at once.
MOST_CONNECTIONS = 200
REQUEST_TIMEOUT_S = 10.0
TOKEN_BYTES = 16
STOP_S = 3.0
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


@contextmanager
def showing(state: PageState, page: PageConfig, listener: socket.socket | None = None) -> Iterator[str]:
    """Serve the page until the block ends. Yields its address, with a token if other machines can reach it.

    Args:
        listener: the socket of `listen(page)`, if that was called before; closed at the end.

    Raises:
        ConfigError: as `listen`.
    """
    state.refresh()
    # uvicorn closes the listener; the copy stops it.
    with listener or listen(page) as listener, ExitStack() as stack:
        stack.callback(close_everywhere, listener.dup())
        address, port = listener.getsockname()[:2]
        token = None if ipaddress.ip_address(address).is_loopback else secrets.token_urlsafe(TOKEN_BYTES)
        key = None if token is None else _Key(token, f"p2ptrain_{port}")
        config = uvicorn.Config(
            make_app(state, (page.host, *page.page_names), key),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,
            headers=list(HEADERS.items()),
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        threads = (
            threading.Thread(target=server.run, args=([listener],), name="p2ptrain-page", daemon=True),
            threading.Thread(target=state.run, name="p2ptrain-dashboard", daemon=True),
        )
        for thread in threads:
            thread.start()
        try:
            yield f"http://{_shown_host(page.host)}:{port}/" + (f"?token={token}" if token else "")
        finally:
            state.closing.set()
            server.should_exit = True
            for thread in threads:
                thread.join(STOP_S)


def listen(page: PageConfig) -> socket.socket:
    """Take the port of a page. Raises ConfigError if it is in use, or the address does not belong to this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(page.host, page.port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=64, dualstack_ipv6=both)
    except OSError as error:
        is_of_name = isinstance(error, socket.gaierror)
        reason = os.strerror(error.errno) if error.errno and not is_of_name else error.strerror or str(error)
        raise ConfigError(
            f"cannot serve the page on {page.host}, port {page.port}: {reason}; choose another port (0: any free one), "
            "or an address of this machine"
        ) from None


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class _Key:
    """The token of a page, and the name of the cookie that holds it: the ports of a host share their cookies."""

    token: str
    cookie: str

    def opens(self, given: str) -> bool:
        """Whether it is the token. Takes the same time for all wrong ones."""
        return secrets.compare_digest(given.encode(), self.token.encode())


def make_app(page_state: PageState, names: Sequence[str], key: _Key | None = None) -> ASGIApp:
    """The application that shows `page_state`, to requests for an address, localhost or an allowed host name.

    Args:
        names: the host names, besides localhost and addresses.
        key: what browsers must have; None: nothing.
    """
    streams = anyio.CapacityLimiter(MOST_STREAMS)

    async def index(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def state(request: Request) -> Response:
        if streams.available_tokens < 1:
            return PlainTextResponse(f"too many open dashboards: {MOST_STREAMS} are allowed", 503)
        return StreamingResponse(_stream(page_state, streams), media_type="text/event-stream")

    def curves(request: Request) -> Response:  # not async: starlette runs it in a worker thread
        given = request.query_params.get("range", "0")
        if given not in map(str, RANGES):
            return PlainTextResponse(f"range: must be one of {', '.join(map(str, RANGES))}", 400)
        return Response(page_state.curves(int(given)), media_type="application/json")

    page = Starlette(
        routes=[
            Route("/", index),
            Route("/api/state", state),
            Route("/api/curves", curves),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)],
    )
    known = frozenset(name.lower() for name in names)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = page
        if scope["type"] == "http" and not is_known_host(Headers(scope=scope).get("host", ""), known):
            answer = PlainTextResponse(
                "This page is served for addresses and localhost only. To open it under a host name, start p2ptrain "
                "with --page-names NAME.\n",
                403,
            )
        elif scope["type"] == "http" and key is not None:
            answer = _unlocked(Request(scope), key, page)
        await answer(scope, receive, send)

    return guarded


async def _stream(page_state: PageState, streams: anyio.CapacityLimiter) -> AsyncIterator[bytes]:
    async with streams:
        version, quiet_s = 0, 0.0
        while not page_state.closing.is_set():
            for at, name, data in page_state.since(version):
                version, quiet_s = at, 0.0
                yield b"event: %b\ndata: %b\n\n" % (name.encode(), data)
            if quiet_s >= ALIVE_S:
                quiet_s = 0.0
                yield b": keep-alive\n\n"
            await anyio.sleep(LOOK_S)
            quiet_s += LOOK_S


def _unlocked(request: Request, key: _Key, app: ASGIApp) -> ASGIApp:
    """The app that answers a request for a page that needs a key: the page, if the browser has the key."""
    if key.opens(request.cookies.get(key.cookie, "")):
        return app
    if not key.opens(request.query_params.get("token", "")):
        return PlainTextResponse(
            "This page needs a token. Open the whole address that p2ptrain printed; it ends in ?token=….\n", 401
        )
    if request.url.path != "/":
        return app
    # Redirect to an address without the token, so that the token is not in the history or in copied addresses. The
    # cookie is lax, not strict, as users may open the address from another site, such as a messenger.
    opened = RedirectResponse("/", 303)
    opened.set_cookie(key.cookie, key.token, httponly=True, samesite="lax")
    return opened


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address, localhost, or an allowed name."""
    name = host.lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") <= 1:
        name = name.partition(":")[0]
    return name == "localhost" or name in names or _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Connection(H11Protocol):
    """uvicorn's protocol of one connection, with a deadline for each request. Used in the thread of its loop only.

    Attributes:
        number: grows with each new one, as the clock of a loop may not tell two apart that came at once.
        waits_since_s: when it began to wait for a whole request, by the clock of the loop.
    """

    number = 0
    waits_since_s = 0.0
    _timer: Any = None
    _last_cycle: object = None

    @property
    def is_busy(self) -> bool:
        """Whether a whole request has come and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        """Close the connection at once, and free its place."""
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        others = [other for other in self.connections if isinstance(other, Connection)]
        self.number = 1 + max((other.number for other in others), default=0)
        super().connection_made(transport)
        self.waits_since_s = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._check)
        if len(others) >= MOST_CONNECTIONS:
            waiting = [other for other in others if not other.is_busy]
            longest = min(waiting, key=lambda other: (other.waits_since_s, other.number), default=self)
            longest.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._last_cycle:
            # A new request: the wait for the next one begins now, or when `_check` sees this one busy.
            self._last_cycle, self.waits_since_s = self.cycle, self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Close the connection if it has waited too long for a request."""
        now = self.loop.time()
        if self.is_busy:
            self.waits_since_s = now
        left_s = self.waits_since_s + REQUEST_TIMEOUT_S - now
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check)
        else:
            self.abort()
