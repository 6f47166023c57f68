"""The page's connections: how many may be open, and how long one may take to send a request.

uvicorn limits neither the time of a request's head nor makes room for others, so a few hundred connections that send
half a request would lock out every browser. Here each has a deadline, and when all places are taken the connection
that has waited longest without a whole request makes room for a new one.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# A browser opens six connections, and sends its request at once.
MOST_CONNECTIONS = 200
REQUEST_TIMEOUT_S = 10.0


class Connections:
    """All open connections. `protocol` makes the protocol object of each, as uvicorn's setting `http` does.

    Used in the thread of uvicorn's event loop only.
    """

    def __init__(self) -> None:
        # In their order, as the clock of an event loop may not tell two that came at once apart.
        self.open: dict[Connection, None] = {}

    def protocol(self, **arguments: Any) -> Connection:
        return Connection(H11Protocol(**arguments), self)

    def admit(self, connection: Connection) -> bool:
        """Whether there is a place; closes the connection that has waited longest for a request if all are taken."""
        if len(self.open) >= MOST_CONNECTIONS:
            waiting = [other for other in self.open if not other.is_busy]
            if not waiting:
                return False
            longest = min(waiting, key=lambda other: other.waits_since_s)
            del self.open[longest]
            longest.abort()
        self.open[connection] = None
        return True


class Connection:
    """A protocol of the event loop around uvicorn's, which does the work."""

    def __init__(self, inner: H11Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: Any = None
        self._timer: Any = None
        self._is_admitted = False
        self._cycle: object = None
        self.waits_since_s = inner.loop.time()

    @property
    def is_busy(self) -> bool:
        """Whether a whole request has come and is not answered yet."""
        cycle = self._inner.cycle
        return cycle is not None and not cycle.response_complete

    def abort(self) -> None:
        self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._is_admitted = self._connections.admit(self)
        if not self._is_admitted:
            transport.abort()
            return
        self._inner.connection_made(transport)
        self._timer = self._inner.loop.call_later(REQUEST_TIMEOUT_S, self._check)

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        self._inner.data_received(data)
        if self._inner.cycle is not self._cycle:
            # A new request: the wait for the next one begins now, or when `_check` sees this one busy.
            self._cycle, self.waits_since_s = self._inner.cycle, self._inner.loop.time()

    def eof_received(self) -> None:
        """The event loop closes the connection, as uvicorn wants it."""

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_admitted:
            self._inner.connection_lost(error)

    def _check(self) -> None:
        """Close the connection if it has waited too long for a request."""
        now = self._inner.loop.time()
        if self.is_busy:
            self.waits_since_s = now
        left_s = self.waits_since_s + REQUEST_TIMEOUT_S - now
        if left_s > 0:
            self._timer = self._inner.loop.call_later(left_s, self._check)
        else:
            self.abort()
