"""Our outer gradient in a round: a snapshot, taken once for all attempts, and its chunks, encoded in its memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import trio
from blake3 import blake3

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.algorithms.codec import Codec, Encoded, difference, is_within
from p2ptrain.algorithms.merkle import Tree, leaf_hash
from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.exchange.types import Snapshot, SnapshotWanted
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.os_memory import release_pages
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.grid import Grid

logger = logging.getLogger(__name__)

# Chunks that a worker thread encodes at a time: 1 to 4 MiB of int8. With a quarter a round of 25M takes a tenth more.
CHUNKS_PER_VISIT = 16


@dataclass(slots=True)
class OwnContribution:
    """A snapshot and its encoded chunks.

    `snapshot.weights` holds the weights until a chunk is encoded, then its bytes at the start of its place, and at the
    end (after `land`) the change to add to the live weights. So a chunk takes no memory of its own. With an error
    buffer the place holds anchor − weights in between, so that the live weights become the new anchor: unsent values
    are then in `next_error`, not in the weights.

    Chunks share no memory, so worker threads may encode or land different ones at the same time. Others may read a
    chunk once it is in `chunks`, and until it lands.

    Attributes:
        grid: of the blocks that the round averages. All arrays below begin with the first of them.
        chunks: the encoded chunks by first block; those that have landed are empty.
        error: values that earlier rounds did not send, (grid.num_blocks, 64); only read. None if the weights keep them.
        tree: commits to all chunks, once `seal` made it.
        digest: of all chunks in order, as hexadecimal text, once `make_digest` made it, where records name it.
        next_error: values that this round does not send; replaces `error` if the round commits with this contribution.
    """

    snapshot: Snapshot
    grid: Grid
    chunks: dict[int, Encoded] = field(default_factory=dict)
    tree: Tree | None = None
    digest: bytes = b""
    error: np.ndarray | None = None
    next_error: np.ndarray | None = None

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: tuple[int, int]) -> None:
        """Encode a chunk of anchor − weights, unless already encoded. Call it in a worker thread.

        Raises ValueError with the reason if the weights are not finite or too far from the anchor.
        """
        start, stop = bounds
        if start in self.chunks:
            return
        weights = self.snapshot.weights.numpy()[self.rows(start, stop)]
        try:
            self.chunks[start] = self._encoded(anchor[start:stop], weights, codec, start)
        except ValueError:
            finite = np.isfinite(weights).all()
            why = f"farther than {MAX_GRADIENT:g} from the anchor" if finite else "not finite"
            raise ValueError(f"its weights are {why}") from None

    def _encoded(self, anchor: np.ndarray, weights: np.ndarray, codec: Codec, start: int) -> Encoded:
        """One encoded chunk, which lies in `weights` if there is no error buffer. If it raises, nothing has changed."""
        if self.error is None or self.next_error is None:
            encoded = codec.encode_difference(anchor, weights, MAX_GRADIENT)
            place = weights.reshape(-1).view(np.uint8)
            place[: len(encoded)] = np.frombuffer(encoded, np.uint8)
            release_pages(place[len(encoded) :])
            return place[: len(encoded)].data.toreadonly()
        rows = self.rows(start, start + len(weights))
        gradient = difference(anchor, weights, MAX_GRADIENT)
        known = gradient.copy()
        known += np.float32(codec.error_decay) * self.error[rows]
        if not is_within(known, MAX_GRADIENT):
            raise ValueError("a value is too large")
        encoded = codec.encode(known)
        self.next_error[rows] = np.subtract(known, codec.decode(encoded, len(weights)))
        weights[:] = gradient
        return encoded

    def land(self, codec: Codec, start: int, change: np.ndarray, averaged: np.ndarray) -> None:
        """Write what this chunk's landing adds to the live weights over its bytes. Call it in a worker thread.

        If it raises, the chunk is as before: only decoding can fail.

        Args:
            start: its first block.
            change: of the anchor in all its blocks; overwritten.
            averaged: the new values of its last blocks, if these are only averaged; `change` does not count there.
        """
        weights = self.snapshot.weights.numpy()[self.rows(start, start + len(change))]
        if self.error is None:
            codec.add(self.chunks[start], len(change), np.float32(1), change)
            weights[:] = change
        else:
            weights += change
        weights[len(change) - len(averaged) :] = averaged
        self.chunks[start] = b""

    def rows(self, start: int, stop: int) -> slice:
        """Where blocks [start, stop) of the vector lie in our arrays."""
        return slice(start - self.grid.first, stop - self.grid.first)

    @property
    def is_whole(self) -> bool:
        """Whether all chunks are encoded."""
        return len(self.chunks) == self.grid.num_chunks

    @property
    def name(self) -> bytes:
        """What names it in a record (`record.name_of`), once all chunks are encoded."""
        return self.tree.root if self.tree is not None else self.digest

    def squared_norm(self, codec: Codec, bounds: list[tuple[int, int]], num_stepped: int) -> float:
        """The squared norm of the chunks among these that are encoded. Call it in a worker thread.

        Args:
            num_stepped: the number of the vector's blocks, from the first, that are outer gradients.
        """
        return sum(
            codec.squared_norm(self.chunks[start], stop - start, max(0, num_stepped - start))
            for start, stop in bounds
            if start in self.chunks
        )

    def leaf(self, bounds: tuple[int, int]) -> bytes:
        """The leaf hash of an encoded chunk. Call it in a worker thread."""
        return leaf_hash(self.chunks[bounds[0]])

    def seal(self, leaves: list[bytes]) -> None:
        """Commit to all chunks, by their leaf hashes in order, with a Merkle tree. Call it in a worker thread."""
        self.tree = Tree(leaves)

    def make_digest(self) -> None:
        """Hash all chunks, which are encoded. Call it in a worker thread."""
        if not self.digest:
            hashed = blake3()
            for start in sorted(self.chunks):
                hashed.update(self.chunks[start])
            self.digest = hashed.hexdigest().encode()


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
        attempt_from_s: when the last attempt began at which we took part.
    """

    def __init__(self, context: RoundContext) -> None:
        self.own: OwnContribution | None = None
        self.sits_out = ""
        self.sent = False
        self._context = context
        # Values of each section that a coarse codec has not sent. With others the error stays in the weights and the
        # next gradient.
        self._errors = {
            section: np.zeros_like(context.state.anchor[section.first : section.end])
            for section in (context.grids.sections if context.codec.error_decay else ())
        }
        self._skipped: frozenset[bytes] = frozenset()
        self._arrived = trio.Event()
        self._encoding = trio.Lock()
        self._users, self._unused = 0, trio.Event()
        self._memory: _Memory | None = None
        self._asked_loss = False
        self._began_s: float | None = None
        self.attempt_from_s = 0.0
        self._traffic_before = (0, 0)

    def begin_attempt(self) -> None:
        """An attempt begins at which we take part."""
        self.attempt_from_s = trio.current_time()
        self.begin()

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
            if self._context.exchange.drops.gradient():
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
                    section, whole_by_s = self._context.grid.section, called_s + 0.9 * window_s
                    self._context.exchange.want_snapshot(SnapshotWanted(memory.buffer, latest_s, whole_by_s, section))
                await self._arrived.wait()
        return self.own

    async def _prepare(self, memory: _Memory) -> None:
        with self._context.errors.containing("getting memory for a snapshot"):
            if not self._others_may_need_parts():
                self._context.parts.trim([])
            exchange, section = self._context.exchange, self._context.grid.section
            memory.buffer = await self._context.compute(exchange.new_buffer, section)
        if memory.buffer is None and self._memory is memory:
            self._memory = None
        memory.ready.set()

    def _others_may_need_parts(self) -> bool:
        """Whether a linked peer may still need the parts of the round before."""
        context = self._context
        return bool(context.host.joiners() or context.liveness.behind(context.exchange.epoch.round))

    def arrive(self, snapshot: Snapshot) -> None:
        """The training thread has taken the requested snapshot."""
        if self.own is None:
            grid = self._context.grid
            error = self._error_of(grid)
            next_error = None if error is None else np.zeros_like(error)
            self.own = OwnContribution(snapshot, grid, error=error, next_error=next_error)
            self._arrived.set()

    def _error_of(self, grid: Grid) -> np.ndarray | None:
        held = [error for section, error in self._errors.items() if grid.holds(section)]
        return np.concatenate(held) if len(held) > 1 else next(iter(held), None)

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
        own = self.own
        if own is not None and own.next_error is not None:
            for section in self._errors:
                if own.grid.holds(section):
                    self._errors[section] = own.next_error[own.rows(section.first, section.end)]

    def gave(self, name: bytes) -> bool:
        """Whether we sent a contribution of this name (`record.name_of`) in this round.

        Also one from before we skipped the round: others may still be READY with a record that has it.
        """
        return name in self._skipped or (self.own is not None and self.own.is_whole and self.own.name == name)

    def includes(self, name: bytes) -> bool:
        """Whether the contribution of this name in a decided record is our present one, which can land.

        In runs without audits all have an empty name: it is the present one if we sent all of it in the attempt that
        was decided.
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
