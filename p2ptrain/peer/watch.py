"""Access from other threads to an observer on the network thread.

`NetworkSession.watch` observes a run without being a member, `Peer.watch` as a member.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from p2ptrain.network.thread import NetworkThread
from p2ptrain.protocol.event_log.observer import Observer, View

# A call takes milliseconds; this is only a safeguard.
TAKE_TIMEOUT_S = 10.0


class Watch:
    """Observes a run until `stop`. Its methods may be called from any thread but the network thread.

    Args:
        thread: the network thread.
        observer: collects the state of the run.
        work: runs the observer until cancelled.
    """

    def __init__(self, thread: NetworkThread, observer: Observer, work: Callable[[], Awaitable[object]]) -> None:
        self._thread = thread
        self._observer = observer
        self._scope = trio.CancelScope()
        thread.start_soon(self._run, work)

    def take(self) -> View:
        """Return the current state of all peers, and the events since the last call. Blocks for milliseconds.

        Raises RuntimeError if the network thread has stopped, TimeoutError if it does not answer.
        """

        async def take() -> View:
            return self._observer.take()

        return self._thread.run(take, timeout_s=TAKE_TIMEOUT_S)

    def stop(self) -> None:
        """Stop observing. Does not block."""
        self._thread.post(self._scope.cancel)

    async def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        with self._scope:
            await work()
