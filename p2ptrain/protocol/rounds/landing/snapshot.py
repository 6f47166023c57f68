"""This peer's snapshot for the current round, taken once for all attempts, and the cost of the round."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import trio

from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.exchange.types import Snapshot, SnapshotWanted
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.landing.contribution import OwnContribution

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of a round so far: bytes on the wire, and seconds since its first attempt."""

    bytes_sent: int
    bytes_received: int
    wall_s: float


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of a round's snapshot, one for all attempts."""

    buffer: torch.Tensor | None = None
    ready: trio.Event = field(default_factory=trio.Event)


class SnapshotTaker:
    """Requests a snapshot from the training thread, and encodes the outer gradient that every attempt sends.

    Attributes:
        own: the contribution to the current round; None until the snapshot is taken.
        sits_out: why we do not contribute to this round; empty if we do.
        sent: whether we sent all of `own` in the attempt that was decided.
    """

    def __init__(self, context: RoundContext) -> None:
        self.own: OwnContribution | None = None
        self.sits_out = ""
        self.sent = False
        self._context = context
        # Values that a coarse codec has not sent. With others the error stays in the weights and the next gradient.
        self._error = np.zeros_like(context.state.anchor) if context.codec.error_decay else None
        self._skipped: frozenset[bytes] = frozenset()
        self._arrived = trio.Event()
        self._encoding = trio.Lock()
        self._users, self._unused = 0, trio.Event()
        self._memory: _Memory | None = None
        self._asked_loss = False
        self._began_s: float | None = None
        self._traffic_before = (0, 0)

    def begin(self) -> None:
        """Count the cost of the round from here, if this has not begun: from its first attempt, or its record."""
        if self._began_s is None:
            self._began_s, self._traffic_before = trio.current_time(), self._traffic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While an attempt may have work in worker threads, which reads our contribution or the anchor."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._unused.set()
            self._unused = trio.Event()

    async def unused(self) -> None:
        """Wait until the work of all attempts has ended, which must have been cancelled."""
        while self._users:
            await self._unused.wait()

    async def take(self, window_s: float) -> OwnContribution | None:
        """The snapshot of this round, taken now if needed; None if training did not take it in time."""
        if not self._asked_loss:
            self._asked_loss = True
            if self._context.exchange.loses_gradient():
                self.sits_out = "its outer gradient was lost"
        if self.sits_out:
            return None
        if self.own is None:
            called_s = trio.current_time()
            if self._memory is None:
                self._memory = _Memory()
                # Not ended with the attempt: the round's next one uses it.
                self._context.start_soon(self._prepare, self._memory)
            memory = self._memory
            with trio.move_on_at(called_s + window_s):
                await memory.ready.wait()
                await trio.lowlevel.checkpoint_if_cancelled()
                if self.own is None and memory.buffer is not None:
                    # The training thread takes it at its next step, on a busy machine later: leave half of the window.
                    # With a GPU it has it a step after that: of a window of 2.5 steps (`schedule.py`), 2.25 are used.
                    # One in slices must be whole a little before the window ends.
                    latest_s = called_s + 0.5 * window_s - self._context.exchange.snapshot_delay_s
                    wanted = SnapshotWanted(memory.buffer, latest_s, whole_by_s=called_s + 0.9 * window_s)
                    self._context.exchange.want_snapshot(wanted)
                await self._arrived.wait()
        return self.own

    async def _prepare(self, memory: _Memory) -> None:
        with self._context.errors.containing("getting memory for a snapshot"):
            if not self._others_may_need_parts():
                self._context.parts.trim([])
            memory.buffer = await self._context.compute(self._context.exchange.new_buffer)
        if memory.buffer is None and self._memory is memory:
            self._memory = None
        memory.ready.set()

    def _others_may_need_parts(self) -> bool:
        """Whether a linked peer may still need the parts of the round before."""
        context = self._context
        return bool(context.host.joiners()) or context.liveness.is_anyone_behind(context.exchange.epoch.round)

    def arrive(self, snapshot: Snapshot) -> None:
        """The training thread has taken the requested snapshot."""
        if self.own is None:
            num_chunks = self._context.grid.num_chunks
            next_error = None if self._error is None else np.zeros_like(self._error)
            self.own = OwnContribution(snapshot, num_chunks, error=self._error, next_error=next_error)
            self._arrived.set()

    async def encode(self, bounds: list[tuple[int, int]]) -> None:
        """Encode these chunks of our contribution. Raises RoundFailedError, and sits out, if weights are unusable."""
        context = self._context
        # Worker threads may still encode for an attempt that has ended: no two may encode the same chunk.
        async with self._encoding:
            own = self.own
            if own is None:
                raise RoundFailedError(self.sits_out or "the round is over")
            encode = functools.partial(own.encode, context.state.anchor, context.codec)
            try:
                await in_parallel(context.compute, encode, bounds)
            except ValueError as error:
                self.own, self._memory, self.sits_out = None, None, str(error)
                logger.warning("sitting this round out: the weights hold NaN, infinity or far too large values")
                raise RoundFailedError(self.sits_out) from None

    def note_included(self) -> None:
        """Our contribution is in the mean: keep the error of a coarse codec for the next round."""
        if self.own is not None and self.own.next_error is not None:
            self._error = self.own.next_error

    def gave(self, name: bytes) -> bool:
        """Whether a record of this round may have our contribution under this name (`record.name_of`).

        It may be one from before we skipped the round: others may still be READY with a record that has it.
        """
        return name in self._skipped or (self.own is not None and self.own.is_whole and self.own.name == name)

    def includes(self, name: bytes) -> bool:
        """Whether a decided record has our present contribution under this name, not one from before a skip.

        Where all have an empty name, it is the present one if we sent all of it in the attempt that was decided.
        """
        is_ours = self.own is not None and self.own.is_whole and self.own.name == name
        return is_ours and (self.sent or name not in self._skipped)

    def skip(self) -> None:
        """The round was skipped: drop its snapshot, and take another one for the next attempt."""
        skipped, memory = self._skipped, self._memory if self.own is None else None
        if self.own is not None and self.own.is_whole:
            skipped |= {self.own.name}
        self.forget()
        self._skipped, self._memory = skipped, memory

    def forget(self) -> None:
        """The round is resolved: drop its snapshot."""
        self.own, self.sits_out, self.sent, self._began_s = None, "", False, None
        self._skipped = frozenset()
        self._memory = None
        self._arrived = trio.Event()
        self._asked_loss = False
        self._context.exchange.want_snapshot(None)

    def spent(self) -> Spent:
        """The cost of the round so far."""
        assert self._began_s is not None, "the round has not begun"
        sent, received = (now - then for now, then in zip(self._traffic(), self._traffic_before, strict=True))
        return Spent(sent, received, trio.current_time() - self._began_s)

    def _traffic(self) -> tuple[int, int]:
        counters = self._context.links.counters
        return counters.sent[Traffic.ROUND], counters.received[Traffic.ROUND]
