"""An observer on the network thread, for any other thread.

`NetworkSession.watch` looks at a run from outside, `Peer.watch` from within.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from p2ptrain.network.thread import NetworkThread
from p2ptrain.protocol.event_log.observer import Observer, View

# The thread is at its work for milliseconds; this only guards against the unexpected.
TAKE_TIMEOUT_S = 10.0


async def off_loop(work: Callable[..., Any], /, *args: Any) -> Any:
    """The checking of what peers say takes a few milliseconds a page."""
    return await trio.to_thread.run_sync(work, *args)


class Watch:
    """Follows a run until `stop`.

    Args:
        thread: where the observer works.
        observer: what this looks through.
        work: lets it work, until cancelled.
    """

    def __init__(self, thread: NetworkThread, observer: Observer, work: Callable[[], Awaitable[object]]) -> None:
        self._thread = thread
        self._observer = observer
        self._scope = trio.CancelScope()
        thread.start_soon(self._run, work)

    def take(self) -> View:
        """Everybody as it stands now, and the events that came since the last call.

        Raises RuntimeError once the network thread has stopped, TimeoutError when it hangs.
        """
        return self._thread.run(self._take, timeout_s=TAKE_TIMEOUT_S)

    def stop(self) -> None:
        """Look no longer."""
        self._thread.post(self._scope.cancel)

    async def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        with self._scope:
            await work()

    async def _take(self) -> View:
        return self._observer.take()
