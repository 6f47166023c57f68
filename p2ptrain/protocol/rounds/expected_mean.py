"""The mean of one part if no member falls out, made chunk by chunk while other chunks are on their way.

Pure. A reducer pushes this mean as it grows; if the leader names other contributors, it is made anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from p2ptrain.algorithms.codec import Encoded
from p2ptrain.protocol.rounds.averaging.strategy import Chunks
from p2ptrain.protocol.wire.messages import Contributor

# Chunks that a worker thread averages at a time; it also encodes and measures (guess).
CHUNKS_AVERAGED = 8

# The encoded chunks of all contributors with their weights, and the chunk's number of blocks.
Received = tuple[list[tuple[Encoded, float]], int]


class ExpectedMean:
    """The chunks of the mean that are not made yet.

    Args:
        bounds: the chunks of the part.
        contributors: those that the roster expects.
        merge: makes the encoded mean of one chunk, as `Averaging.merge`.

    Attributes:
        contributors: without Merkle roots.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], contributors: Sequence[Contributor],
        merge: Callable[[Sequence[tuple[Encoded, float]], int], bytes],
    ) -> None:  # fmt: skip
        self.contributors = tuple(contributors)
        self._merge = merge
        self._left = deque(bounds)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks were taken."""
        return not self._left

    def take(self, chunks: Chunks, threads: int) -> list[Received]:
        """The next chunks for so many worker threads, in the part's order, that all contributors have sent.

        Empty while one is awaited.
        """
        taken: list[Received] = []
        while self._left and len(taken) < CHUNKS_AVERAGED * threads:
            start, stop = self._left[0]
            senders = [c for c in self.contributors if start in chunks.get(c.peer_id, ())]
            if len(senders) < len(self.contributors):
                break
            taken.append(([(chunks[c.peer_id][start], c.weight) for c in senders], stop - start))
            self._left.popleft()
        return taken

    def average(self, received: Received) -> bytes:
        """The encoded mean of a chunk. Changes nothing; for worker threads. Raises WireError if it is not finite."""
        return self._merge(*received)


def without_roots(contributors: Sequence[Contributor]) -> tuple[Contributor, ...]:
    """As a roster names them, before their Merkle roots are known."""
    return tuple(Contributor(c.peer_id, c.incarnation, c.weight, b"") for c in contributors)
