"""The interface of averaging strategies: who sends what to whom, how chunks are combined, how the mean is decoded.

Every attempt has the same steps. The leader makes a *plan*: parts, each a range of blocks and its reducer. Every member
sends its encoded chunks of each part to that part's reducer. When the leader has named the contributors, each reducer
*reduces* its part to blobs of bytes, serves them by hash, and reports the hashes. From enough reports the leader
*concludes* the parts of the record. Members fetch the blobs in the record, and *decode* the mean chunk by chunk.

Strategies are pure. Peers that decode the same record get the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.averaging import disjoint_mean, weighted_mean
from p2ptrain.algorithms.codec import Codec
from p2ptrain.algorithms.metrics import encoded_gram
from p2ptrain.protocol.wire.messages import Contributor, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

Array = npt.NDArray[np.float32]
# The bytes of a blob, by its SHA-256.
Blobs = Callable[[str], bytes | bytearray]
# The encoded chunks that a reducer holds: by member, then by first block.
Chunks = dict[PeerId, dict[int, bytes]]
Merge = Callable[[Sequence[tuple[bytes, float]], Codec, int], Array]

# Outer gradients are compared in pairs if there are at most MAX_COMPARED, in about SAMPLED_CHUNKS of each part.
MAX_COMPARED = 16
SAMPLED_CHUNKS = 8


@dataclass(frozen=True)
class ReducedPart:
    """A reduced part.

    Attributes:
        blobs: to serve, each with its SHA-256, in the order of the reported hashes.
        gram: the inner products of the contributors' outer gradients in this part, row by row; empty if too many.
    """

    blobs: list[tuple[str, bytes | bytearray]]
    gram: tuple[float, ...]


@dataclass(frozen=True)
class Conclusion:
    """The parts of a record, and their Gram matrices, whose sum is that of the whole vectors."""

    parts: tuple[Part, ...]
    grams: tuple[tuple[float, ...], ...]


class Averaging(Protocol):
    """A stateless strategy, made from the run's settings."""

    @property
    def needs_every_reducer(self) -> bool:
        """Whether an attempt fails if any reducer fails."""
        ...

    def plan(self, reducers: Sequence[PeerId], num_blocks: int) -> tuple[RosterPart, ...]:
        """The blocks that each reducer receives of every member's outer gradient.

        Args:
            reducers: members that are linked to all the others, the best first; at least one.
        """
        ...

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        """Raises WireError unless `plan` could have made this plan."""
        ...

    def reduce(
        self, part: RosterPart, chunks: Chunks, contributors: Sequence[Contributor], compared: int
    ) -> ReducedPart:
        """Combine the contributors' chunks of one part. Call it in a worker thread.

        Args:
            chunks: every chunk of the part for every contributor; removed, to free memory early.
            compared: the number of blocks, from the first, that are outer gradients and compared with each other.

        Raises:
            WireError: a mean that is not finite.
        """
        ...

    def conclude(
        self, plan: Sequence[RosterPart], contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        """The record's parts if these reports (by part number) suffice, else None."""
        ...

    def check_record(self, record: Record, num_blocks: int) -> None:
        """Raises WireError unless `decode` gives the whole mean from the record's parts."""
        ...

    def size_bytes(self, record: Record, part: Part) -> int:
        """Size of the blob of a record's part."""
        ...

    def spans(self, record: Record) -> list[tuple[int, int]]:
        """Ranges of whole chunks that cover the vector in order, each decoded in one call of the worker thread."""
        ...

    def decode(self, record: Record, blobs: Blobs, start: int, stop: int) -> Array:
        """The mean outer gradient of one chunk: (stop - start, 64) float32, fresh, finite.

        Args:
            blobs: returns the bytes of a blob in the record, of size `size_bytes`.

        Raises:
            WireError: bytes that do not decode.
        """
        ...


def merge_of(run: RunConfig) -> Merge:
    """The mean in a run's settings."""
    return disjoint_mean if run.round_mean == "disjoint" else weighted_mean


def sha256_of(data: bytes | bytearray) -> str:
    """The hash that names a blob."""
    return hashlib.sha256(data).hexdigest()


def gram_of(
    chunks: Chunks, bounds: Sequence[tuple[int, int]], contributors: Sequence[Contributor], codec: Codec, compared: int
) -> tuple[float, ...]:
    """Estimate the Gram matrix of the contributors' outer gradients in these chunks, from a sample."""
    if len(contributors) > MAX_COMPARED:
        return ()
    comparable = {start: (stop, min(stop, compared) - start) for start, stop in bounds if start < compared}
    sampled = dict(list(comparable.items())[:: max(1, len(comparable) // SAMPLED_CHUNKS)])
    products = np.zeros((len(contributors), len(contributors)))
    for start, (stop, count) in sampled.items():
        encoded = [chunks[c.peer_id][start] for c in contributors]
        products += encoded_gram(encoded, codec, stop - start, count)
    products *= sum(n for _, n in comparable.values()) / max(1, sum(n for _, n in sampled.values()))
    return tuple(products.ravel().tolist())
