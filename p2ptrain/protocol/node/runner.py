"""Runs a peer's node, and replaces a node that ends with an exception.

The new node has the same identity, state and exchange, and a new incarnation: to other peers it is a restarted peer.
Training continues meanwhile, without exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import ConfigError, NetworkFailedError
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.restarts import Restarts
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.wire.transport import Compute

logger = logging.getLogger(__name__)

# Seconds before the first restart, the second, and so on. There are few, as repeated failures have a lasting reason.
RESTART_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# Restarts are counted from 0 again after a node has run this long: several rounds of a small model (guess).
HEALTHY_S = 300.0
POLL_S = 0.05

BuildNode = Callable[[bool, Restored | None, int], Node]
"""Makes a node from `may_found`, its restored state, and its number, which counts from 0."""


class NodeRunner:
    """Owns the node.

    Args:
        may_found, restored: for the first node.

    Attributes:
        node: the current or last node.
        last_ready: the last node that had the run's state, or the first node. Checkpoints save its anchor.
        failure: why no other node is started; None while a node runs or is being restarted.
    """

    def __init__(
        self, build: BuildNode, exchange: Exchange, compute: Compute, *, may_found: bool, restored: Restored | None
    ) -> None:
        self.node = self.last_ready = build(may_found, restored, 0)
        self.failure: Exception | None = None
        self._build = build
        self._exchange = exchange
        self._compute = compute
        self._may_found = may_found
        self._restored = restored
        self._built = 1
        self._restarting = ""
        self._replaced = trio.Event()

    @property
    def status(self) -> str:
        """What this peer is doing now, as text. For any thread."""
        return self._restarting or self.node.status

    async def with_links(self, work: Callable[[Links], Awaitable[object]]) -> None:
        """Run `work` with the links of the current node, and again with those of each new node, until cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work, self.node.links)
                await self._replaced.wait()
                nursery.cancel_scope.cancel()

    async def run_forever(self) -> None:
        """Run nodes until cancelled, or until the last restart fails; then `failure` holds the reason.

        `failure` is a ConfigError if the run could not be joined.
        """
        restarts = Restarts(RESTART_AFTER_S, HEALTHY_S)
        while True:
            began_s = trio.current_time()
            error = await self._live()
            cause = innermost(error)
            if isinstance(cause, ConfigError) and not self.last_ready.ready.is_set():
                self.failure = cause
                return
            delay_s = restarts.next_delay_s(trio.current_time() - began_s)
            if delay_s is None:
                break
            self._restarting = f"restarting the network side ({restarts.count} of {len(RESTART_AFTER_S)})"
            logger.error(
                "the network side of this peer failed (%r) and is started again in %.1f s; please report this",
                cause,
                delay_s,
                exc_info=error,
            )
            await trio.sleep(delay_s)
        self._restarting = "cut off: the network side has failed"
        self.failure = NetworkFailedError(
            f"the network side failed {restarts.count + 1} times in a row, last with {cause!r}; training continues "
            "alone. Restart this peer, and report the traceback in its log"
        )
        self.failure.__cause__ = cause
        logger.error("%s", self.failure, exc_info=error)

    async def _live(self) -> BaseException:
        """Run one node, built first if it replaces another. Returns the error that ended it."""
        ended: BaseException = RuntimeError("the node has returned")
        try:
            if self._restarting:
                await self._rebuild()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._note_ready, self.node)
                await self.node.run_forever()
        except* Exception as errors:
            ended = errors
        return ended

    async def _rebuild(self) -> None:
        """Replace the node that has ended."""
        while self._exchange.landing_pending:
            # A round that the last node committed is not in the weights yet.
            await trio.sleep(POLL_S)
        restored = await self._remembered()
        met_others = self.node.met_others
        self._may_found = self._may_found and not met_others
        self.node = self._build(self._may_found, restored, self._built)
        self._built += 1
        self._restarting = ""
        replaced, self._replaced = self._replaced, trio.Event()
        replaced.set()

    async def _note_ready(self, node: Node) -> None:
        await node.ready.wait()
        self.last_ready = node
        self._restored = None  # it holds a whole state

    async def _remembered(self) -> Restored | None:
        """The state of the last node; None if it ended in the middle of changing it."""
        node = self.last_ready
        if not node.ready.is_set():
            return self._restored
        await self._compute(node.state.rehash)
        if node.state.hashes.state != node.driver.head.state_hash:
            logger.error("the agreed state was left half changed: downloading it from the other peers")
            return None
        return Restored(
            node.state,
            node.driver.head,
            self._exchange.run_step,
            node.driver.history,
            ours=True,
            from_initial_peer=node.state_sync.joining.from_initial_peer,
        )
