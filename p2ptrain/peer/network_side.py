"""The network side of a peer: its node on the network thread, from joining to leaving."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError, NetworkFailedError
from p2ptrain.network.host import Network
from p2ptrain.network.thread import POLL_S, NetworkThread
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer_state import Array, to_dict
from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import Epoch
from p2ptrain.protocol.node.runner import NodeRunner
from p2ptrain.protocol.state_sync.checkpoint import Restored

logger = logging.getLogger(__name__)

# A Leave needs one write per link.
LEAVE_S = 0.3
# To finish a committed round when leaving: its mean, step and hashes take seconds for a large model.
LANDING_S = 5.0
# For the node's tasks to end. An outer step that is under way goes on, and `state_dict` waits for it.
ENDED_S = 5.0
# At the end, for transfers to and from a GPU that are under way: they take well below a second unless it hangs.
TRANSFERS_S = 5.0
# How often a leaving thread looks whether it may go on.
LEAVING_POLL_S = 0.01
# To copy anchor and moments, after a round that is landing.
STATE_TIMEOUT_S = 120.0


class NetworkSide:
    """Runs the node of a peer on the network thread. The training thread calls its methods.

    Attributes:
        ended: set when the node has ended.
    """

    def __init__(
        self,
        runner: NodeRunner,
        exchange: Exchange,
        parts: ModelParts,
        workers: Workers,
        network: Network,
        thread: NetworkThread,
    ) -> None:
        """`workers` are closed when the node has ended."""
        self.ended = threading.Event()
        self._runner = runner
        self._exchange = exchange
        self._parts = parts
        self._workers = workers
        self._network = network
        self._thread = thread
        self._scope: trio.CancelScope | None = None
        self._has_left = self._has_refused = self._lands = self._was_cut_off = False
        self._errors = ErrorLog(logger)

    @property
    def failure(self) -> Exception | None:
        """Why it has ended for good; None while it runs or is restarted."""
        failure = self._runner.failure or self._network.failure
        if failure is not None or not self._is_cut_off:
            return failure
        why = self._thread.failure or "its event loop failed"
        return NetworkFailedError(
            f"the network thread has ended ({why!r}); training continues alone. Restart this peer, and report its log"
        )

    @property
    def _is_cut_off(self) -> bool:
        """Whether the thread has ended before this peer left."""
        return self._was_cut_off or (self._thread.has_stopped and not self._has_left)

    def start(self, on_event: Callable[..., None]) -> None:
        """Run the node, and pass the events of the network to `on_event`."""
        self._thread.start_soon(self._run, on_event)

    async def _run(self, on_event: Callable[..., None]) -> None:
        try:
            with trio.CancelScope() as self._scope, self._network.recording(on_event):
                await self._runner.run_forever()
        finally:
            self._workers.close()
            self.ended.set()

    def await_ready(self, note_status: Callable[[], None]) -> None:
        """Wait until the model has the run's state. `note_status` is called every `POLL_S` meanwhile.

        Raises what has ended the network side, RunMismatchError if the run trains another model, and ConfigError if
        the run's weights cannot be written.
        """
        while not self._runner.last_ready.ready.is_set():
            if self.failure is not None:
                raise self.failure
            node = self._runner.node
            if (mismatch := node.links.mismatch) is not None and not node.alive:
                raise mismatch
            note_status()
            self._exchange.idle()
            if (unwritten := self._exchange.landing_error) is not None:
                if isinstance(unwritten, torch.cuda.OutOfMemoryError):
                    reason = str(unwritten).partition("\n")[0]
                    raise ConfigError(
                        f"too little memory on the GPU to write the run's weights ({reason}); free some of it, or "
                        f"train a smaller model"
                    ) from unwritten
                raise unwritten
            self.ended.wait(POLL_S)

    def state_dict(self) -> dict[str, Any]:
        """The result of `Peer.state_dict`. Lands what the state has and the weights do not.

        Raises as `Peer.state_dict`.
        """
        node = self._runner.last_ready

        def state_of(vectors: Sequence[Array]) -> dict[str, Any]:
            committer = node.driver.committer
            if committer.interrupted or (self._thread.has_stopped and committer.stepping):
                raise TimeoutError("a round changed only a part of the state, as an error interrupted it")
            exchange = self._exchange
            return to_dict(node.driver.head, node.driver.history, exchange.run_step, exchange.tokens, vectors)

        async def copy() -> tuple[Epoch, dict[str, Any]]:
            async with node.driver.committer.lock:
                while self._exchange.landing_pending:
                    await trio.sleep(POLL_S)
                return self._exchange.epoch, state_of([await self._workers(v.copy) for v in node.state.vectors])

        def land() -> None:
            self.idle()
            if self._exchange.landing_pending and (error := self._exchange.landing_error) is not None:
                raise TimeoutError(f"a round could not be landed in the weights: {error}") from error

        while not self._has_left and not self._is_cut_off:
            try:
                epoch, state = self._thread.run(copy, timeout_s=STATE_TIMEOUT_S, meanwhile=land)
            except RuntimeError:
                if self._is_cut_off:
                    break
                raise
            if epoch == self._exchange.epoch:  # else `land` has landed the next round, too
                return state
        if not self._thread.has_stopped and not self.ended.wait(STATE_TIMEOUT_S):
            raise TimeoutError(f"a round took more than {STATE_TIMEOUT_S:.0f} s to change the state")
        exchange, lands = self._exchange, self._lands or self._is_cut_off
        self._await_transfers(
            lambda: lands and exchange.landing_pending and self._idle() and exchange.landing_error is None
        )
        if lands and exchange.landing_pending:
            why = exchange.landing_error or "it took too long"
            raise TimeoutError(f"the last round could not be landed in the weights: {why}")
        return state_of([vector.copy() for vector in node.state.vectors])

    def restore(self, restored: Restored) -> bool:
        """Restore a state, and wait until it has landed. Returns False if the run is ahead of it.

        Raises as `Peer.load_state_dict`.
        """
        state_sync = self._runner.last_ready.state_sync
        if not self._thread.run(state_sync.can_restore, restored, timeout_s=STATE_TIMEOUT_S):
            return False
        landed = threading.Event()

        async def restore() -> None:
            await state_sync.restore(restored)
            landed.set()

        # Not `run`, which would cancel it at the end of the time, between two heads.
        self._thread.start_soon(restore)
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while not landed.wait(POLL_S):
            self.idle()
            if time.monotonic() > deadline:
                raise ConfigError(f"the state could not be restored within {STATE_TIMEOUT_S:.0f} s")
        return True

    def idle(self) -> None:
        """Land a round and take a snapshot without a training step. Raises ConfigError as `Peer.step`, if one lands."""
        if self._exchange.landing_pending:
            self._parts.check_in_place()
        self._exchange.idle()

    def end(self, reason: str, *, landing: bool) -> None:
        """Tell the other peers, and end the node. A round that has landed in part lands whole.

        `landing`: let a round that is being committed land, too.
        """
        self._was_cut_off = self._is_cut_off
        self._has_left, self._lands = True, landing
        if self._scope is None:
            return
        idle: Callable[[], bool] = self._idle if landing else (lambda: True)
        try:
            if self._exchange.finished:
                # A thread that stopped or hangs has nobody to stay for.
                with contextlib.suppress(RuntimeError, TimeoutError):
                    self._thread.run(self._runner.node.stay, timeout_s=self._runner.node.longest_stay_s + 1.0)
            self._thread.post(lambda: self._runner.node.leave(reason))
            self._land_the_last(LEAVE_S if self._runner.node.alive else 0.0, idle)
        finally:
            self._thread.post(self._scope.cancel)
            self.ended.wait(ENDED_S)
            if not self._has_refused:
                self._exchange.finish_landing()
        # What is under way holds memory of the device and the host, which may be freed only when that is done.
        self._await_transfers(lambda: idle() and self._is_under_way())

    def _await_transfers(self, goes_on: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TRANSFERS_S
        while goes_on() and time.monotonic() < deadline:
            time.sleep(LEAVING_POLL_S)

    def _land_the_last(self, at_least_s: float, idle: Callable[[], bool]) -> None:
        """Wait until the Leave is sent and a round that is being committed has landed."""
        began_s = time.monotonic()
        while not self.ended.wait(LEAVING_POLL_S):
            waited_s = time.monotonic() - began_s
            if waited_s > (LANDING_S if self._runner.node.driver.committer.resolving else at_least_s):
                break
            idle()

    def _idle(self) -> bool:
        """As `idle`, for leaving, which an error of the device must not prevent. Returns whether it worked."""
        try:
            self.idle()
        except ConfigError as error:
            if not self._has_refused:
                logger.warning("the last round was not landed: %s", error)
            self._has_refused = True
            return False
        except Exception as error:
            self._errors.note("landing a round while leaving", error)
            return False
        return True

    def _is_under_way(self) -> bool:
        try:
            return self._exchange.under_way
        except Exception as error:
            self._errors.note("waiting for transfers while leaving", error)
            return False
