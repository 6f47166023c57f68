"""The encoded chunks that a reducer receives for one part of an attempt, checked on arrival.

Chunks stay encoded, and are kept until the leader has named the contributors. `EarlyChunks` holds chunks that arrive
before the roster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.algorithms.metrics import encoded_gram
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.averaging.strategy import Chunks
from p2ptrain.protocol.rounds.grid import Grid
from p2ptrain.protocol.rounds.timeouts import SLOWEST_BYTES_S, Timeouts
from p2ptrain.protocol.wire.messages import Contribution, Contributor, RosterPart
from p2ptrain.protocol.wire.transport import PeerId

# Chunks before the roster: at most this many encoded models in all, and one of each member.
MOST_EARLY_MODELS = 2
# Outer gradients are compared in pairs if there are at most MAX_COMPARED, in about SAMPLED_CHUNKS of each part.
MAX_COMPARED = 16
SAMPLED_CHUNKS = 8


def check_bytes(codec: Codec, start: int, stop: int, data: Encoded) -> None:
    """Raises WireError unless these bytes have the size of one chunk and decode."""
    if len(data) != codec.size_bytes(stop - start):
        raise WireError(f"chunk [{start}, {stop}) has {len(data)} bytes, not {codec.size_bytes(stop - start)}")
    codec.check(data, stop - start)


class Collection:
    """The chunks of one part, the roster's `number`th.

    Attributes:
        chunks: by sender, then by first block.
        complete, failed: senders whose chunks are all here, and senders that were excluded.
    """

    def __init__(
        self,
        number: int,
        part: RosterPart,
        senders: Sequence[PeerId],
        grid: Grid,
        codec: Codec,
        timeouts: Timeouts,
        now: float,
    ) -> None:
        self.number = number
        self.part = part
        self.complete: set[PeerId] = set()
        self.failed: set[PeerId] = set()
        self.chunks: Chunks = {sender: {} for sender in senders}
        self._codec = codec
        self._timeouts = timeouts
        self._bounds = dict(grid.bounds(part.start, part.stop))
        # A chunk on the slowest line, which carries one to each reducer.
        self._slowest_s = len(senders) * codec.size_bytes(grid.chunk_blocks) / SLOWEST_BYTES_S
        # Of senders whose chunks are awaited.
        self._progress_at = dict.fromkeys(senders, now)

    def add(self, sender: PeerId, start: int, stop: int, data: Encoded, now: float, *, checked: bool = False) -> bool:
        """Add one chunk; True if its sender is complete now. Raises WireError if it is off the plan or does not decode.

        Args:
            checked: the bytes were checked before, or are our own.
        """
        if sender not in self._progress_at:
            return False
        if self._bounds.get(start) != stop:
            raise WireError(f"chunk [{start}, {stop}) is not of part [{self.part.start}, {self.part.stop})")
        if not checked:
            check_bytes(self._codec, start, stop, data)
        chunks = self.chunks[sender]
        if start in chunks:
            # The first one was measured, and hashed.
            return False
        chunks[start] = data
        self._timeouts.note_wait(sender, now - self._progress_at[sender])
        self._progress_at[sender] = now
        if len(chunks) == len(self._bounds):
            self.complete.add(sender)
            del self._progress_at[sender]
        return sender in self.complete

    def fail(self, sender: PeerId) -> bool:
        """Exclude a sender; True if it was awaited."""
        if self._progress_at.pop(sender, None) is None:
            return False
        self.failed.add(sender)
        self.chunks[sender] = {}
        return True

    def reject(self, sender: PeerId) -> None:
        """Exclude a sender whose chunks are complete, but were refused."""
        self.complete.discard(sender)
        self.failed.add(sender)
        self.chunks[sender] = {}

    def clear(self) -> None:
        """Drop all chunks, and await no more."""
        self.chunks, self._progress_at = {}, {}

    def give_up_stalled(self, now: float, rtt_s: dict[PeerId, float]) -> bool:
        """Exclude awaited senders that made no progress for too long, except the reducer; True if there were any.

        Our own chunks come when our worker threads have time: they cannot be lost, and without them nobody else gets
        ours either.
        """
        stalled = [
            sender
            for sender, at in self._progress_at.items()
            if sender != self.part.reducer
            and now - at > self._timeouts.stall_s(sender, rtt_s.get(sender, 0.0), self._slowest_s)
        ]
        for sender in stalled:
            self._timeouts.note_wait(sender, now - self._progress_at[sender])
            self.fail(sender)
        return bool(stalled)

    def gram(self, contributors: Sequence[Contributor], compared: int) -> Callable[[], tuple[float, ...]]:
        """What computes the inner products of the contributors' outer gradients in this part, row by row.

        They are estimated from a sample of chunks, and left out if there are too many contributors. Call the result in
        a worker thread. It holds the chunks of the sample, which may be dropped here meanwhile.

        Args:
            compared: the number of the vector's blocks, from the first, that are outer gradients.
        """
        if len(contributors) > MAX_COMPARED:
            return tuple
        comparable = {start: min(stop, compared) - start for start, stop in self._bounds.items() if start < compared}
        sampled = dict(list(comparable.items())[:: max(1, len(comparable) // SAMPLED_CHUNKS)])
        encoded = {start: [self.chunks[c.peer_id][start] for c in contributors] for start in sampled}

        def work() -> tuple[float, ...]:
            products = np.zeros((len(contributors), len(contributors)))
            for start, count in sampled.items():
                products += encoded_gram(encoded[start], self._codec, self._bounds[start] - start, count)
            products *= sum(comparable.values()) / max(1, sum(sampled.values()))
            return tuple(products.ravel().tolist())

        return work


class EarlyChunks:
    """Chunks received before the roster, bounded by `MOST_EARLY_MODELS`.

    Attributes:
        overrun: members whose chunk was dropped for lack of room, or whose link broke; they cannot become complete.
    """

    def __init__(self, codec: Codec, grid: Grid) -> None:
        self.overrun: set[PeerId] = set()
        self._codec = codec
        self._grid = grid
        self._model_bytes = codec.size_bytes(grid.num_blocks)
        self._held: dict[PeerId, dict[tuple[int, int], tuple[Contribution, bytes]]] = {}
        self._held_bytes: dict[PeerId, int] = {}

    def add(self, sender: PeerId, message: Contribution, data: bytes) -> None:
        """Keep one chunk, or mark its sender as overrun. Raises WireError if it fits no roster."""
        start, stop = message.start, message.stop
        self._grid.check_chunk(start, stop)
        held, held_bytes = self._held.setdefault(sender, {}), self._held_bytes.get(sender, 0)
        if (start, stop) in held or sender in self.overrun:
            return
        check_bytes(self._codec, start, stop, data)
        in_all = sum(self._held_bytes.values()) + len(data)
        if held_bytes + len(data) > self._model_bytes or in_all > MOST_EARLY_MODELS * self._model_bytes:
            self.overrun.add(sender)
            self._held[sender], self._held_bytes[sender] = {}, 0
            return
        held[start, stop] = message, data
        self._held_bytes[sender] = held_bytes + len(data)

    def take(self) -> Iterator[tuple[PeerId, Contribution, bytes]]:
        """Remove and yield all chunks."""
        held, self._held, self._held_bytes = self._held, {}, {}
        for sender, chunks in held.items():
            for message, data in chunks.values():
                yield sender, message, data
