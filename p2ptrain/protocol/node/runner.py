"""Keeps a node under a peer: one that ends with an exception is built anew.

The new node has the same identity, state and exchange, and a new incarnation: to the others it is a peer that was
restarted. Training goes on meanwhile; it only exchanges nothing.
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
from p2ptrain.protocol.node.restarts import Restarts
from p2ptrain.protocol.state_sync.state_sync import ModelAccess, Restored
from p2ptrain.protocol.wire.transport import Compute

logger = logging.getLogger(__name__)

# Before the first restart, the second, and so on. Few: what fails as often fails for a reason that stays.
RESTART_AFTER_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# A node that lived as long was a good one: after it, counting begins anew. Several rounds of a small model (guess).
HEALTHY_S = 300.0
# How often to look whether the training thread has come by.
POLL_S = 0.05

BuildNode = Callable[[bool, Restored | None, int], Node]
"""Makes a node: whether it may found the run at once, what it comes with, and its number, 0 for the first."""


class KeptBuffers:
    """A model that is being trained: its buffers are given to joiners, and never overwritten under a forward pass."""

    def __init__(self, model: ModelAccess) -> None:
        self._model = model

    def buffers(self) -> bytes:
        return self._model.buffers()

    def load_buffers(self, data: bytes) -> None:
        """Keep our own: persistent buffers stay local once training has begun."""


class NodeRunner:
    """Owns the node.

    Args:
        build: makes a node on `exchange`.
        compute: runs long work off the loop.
        may_found, restored: for the first node.

    Attributes:
        node: the one that runs, or ran last.
        settled: the last one that stood on the run's state: whose anchor a checkpoint takes.
        failure: why there will be no node any more; None while there is one, or may be one again.
    """

    def __init__(
        self, build: BuildNode, exchange: Exchange, compute: Compute, *, may_found: bool, restored: Restored | None
    ) -> None:
        self.node = self.settled = build(may_found, restored, 0)
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
        """What this peer is doing now, for people. For any thread."""
        return self._restarting or self.node.status

    async def with_links(self, work: Callable[[Links], Awaitable[object]]) -> None:
        """Run `work` with the node's links until cancelled, and anew with those of each node that takes its place."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work, self.node.links)
                await self._replaced.wait()
                nursery.cancel_scope.cancel()

    async def run_forever(self) -> None:
        """Run the node, and another after it; until cancelled, or until the last of many restarts has failed.

        `failure` tells why it has returned: a ConfigError where the run could not be joined at all.
        """
        restarts = Restarts(RESTART_AFTER_S, HEALTHY_S)
        while True:
            began_s = trio.current_time()
            error = await self._live()
            self._exchange.detach()
            cause = innermost(error)
            if isinstance(cause, ConfigError) and not self.settled.ready.is_set():
                self.failure = cause
                return
            delay_s = restarts.next_delay_s(trio.current_time() - began_s)
            if delay_s is None:
                break
            self._restarting = f"restarting the network side ({restarts.count} of {len(RESTART_AFTER_S)})"
            logger.error(
                "the network side of this peer failed (%r) and is started again in %.1f s; please report this",
                cause, delay_s, exc_info=error,
            )  # fmt: skip
            await trio.sleep(delay_s)
        self._restarting = "cut off: the network side has failed"
        self.failure = NetworkFailedError(
            f"the network side failed {restarts.count + 1} times in a row, at last with {cause!r}; training goes on "
            "alone. Restart this peer, and report the traceback in its log"
        )
        self.failure.__cause__ = cause
        logger.error("%s", self.failure, exc_info=error)

    async def _live(self) -> BaseException:
        """One node's life; of all but the first from its making on. Returns what it ended with."""
        ended: BaseException = RuntimeError("the node has returned")
        try:
            if self._restarting:
                await self._rebuild()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._note_settled, self.node)
                await self.node.run_forever()
        except* Exception as errors:
            ended = errors
        return ended

    async def _rebuild(self) -> None:
        """Put another node in the place of the one that has ended."""
        while self._exchange.landing_pending:
            # A round that the last node has brought home is half in the weights until training comes by.
            await trio.sleep(POLL_S)
        restored = await self._remembered()
        met_others = self.node.met_others
        self._may_found = self._may_found and not met_others
        self.node = self._build(self._may_found, restored, self._built)
        self._built += 1
        self._restarting = ""
        replaced, self._replaced = self._replaced, trio.Event()
        replaced.set()

    async def _note_settled(self, node: Node) -> None:
        await node.ready.wait()
        self.settled = node

    async def _remembered(self) -> Restored | None:
        """The state that the last node stood on; None where it ended in the middle of changing it."""
        node = self.settled
        if not node.ready.is_set():
            return self._restored
        await self._compute(node.state.rehash)
        if node.state.hashes.state != node.engine.head.state_sha256:
            logger.error("the agreed state was left half changed: it is taken from the other peers")
            return None
        return Restored(node.state, node.engine.head, self._exchange.run_step)
