"""What an averaging strategy has to say: who sends what to whom, how chunks are combined, and how the outcome decodes.

An attempt goes the same way under every strategy. The leader makes a *plan*: parts, each a run of blocks and its
reducer. Every member sends its encoded chunks of each part to that part's reducer. When the leader has named the
contributors, each reducer *reduces* its part: it turns what it holds into blobs of bytes that it serves by their hash,
and reports the hashes. From enough reports the leader *concludes* the parts of the record. Members fetch the blobs
that the record names, and *decode* the mean outer gradient from them, chunk by chunk.

Everything here is pure: bytes and records in, bytes and records out. Two peers that decode the same record get the same
bits.
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

# Outer gradients are compared in pairs where there are at most so many, in about so many chunks of each part.
MAX_COMPARED = 16
SAMPLED_CHUNKS = 8


@dataclass(frozen=True)
class ReducedPart:
    """What one reducer made of its part.

    Attributes:
        blobs: what it serves from now on, each with its SHA-256, in the order in which the hashes are reported.
        gram: the inner products of the contributors' outer gradients there, row by row; empty when there are too many.
    """

    blobs: list[tuple[str, bytes | bytearray]]
    gram: tuple[float, ...]


@dataclass(frozen=True)
class Conclusion:
    """The parts of a record, and the Gram matrices that add up to that of the whole vectors."""

    parts: tuple[Part, ...]
    grams: tuple[tuple[float, ...], ...]


class Averaging(Protocol):
    """One strategy. Made from the run's settings, without state."""

    @property
    def needs_every_reducer(self) -> bool:
        """Whether an attempt fails with any of its reducers; else they are like other members."""
        ...

    def plan(self, reducers: Sequence[PeerId], num_blocks: int) -> tuple[RosterPart, ...]:
        """Who receives which blocks of every member's outer gradient.

        Args:
            reducers: members that are linked to all the others, the best first; at least one.
        """
        ...

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        """Raises WireError unless this is a plan that `plan` could have made."""
        ...

    def reduce(
        self, part: RosterPart, chunks: Chunks, contributors: Sequence[Contributor], compared: int
    ) -> ReducedPart:
        """Combine the contributors' chunks of one part. Heavy: call it in a worker thread.

        Args:
            chunks: hold every chunk of the part for every contributor; used up, to free memory early.
            compared: the first so many blocks of the whole vector are outer gradients, compared with each other.

        Raises:
            WireError: a mean that is not finite.
        """
        ...

    def conclude(
        self, plan: Sequence[RosterPart], contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        """The record's parts, as soon as these reports, by number of their part, are enough; None before."""
        ...

    def check_record(self, record: Record, num_blocks: int) -> None:
        """Raises WireError unless the record's parts are such that `decode` gives the whole mean."""
        ...

    def size_bytes(self, record: Record, part: Part) -> int:
        """Bytes of the blob that a record's part names."""
        ...

    def spans(self, record: Record) -> list[tuple[int, int]]:
        """Runs of whole chunks that cover the vector in order: what is decoded in one visit to the worker thread."""
        ...

    def decode(self, record: Record, blobs: Blobs, start: int, stop: int) -> Array:
        """The mean outer gradient of one chunk: (stop - start, 64) float32, fresh, finite.

        Args:
            blobs: gives the bytes of every blob that the record names and that has a size of `size_bytes`.

        Raises:
            WireError: bytes that do not decode.
        """
        ...


def merge_of(run: RunConfig) -> Merge:
    """The mean that a run's settings name."""
    return disjoint_mean if run.round_mean == "disjoint" else weighted_mean


def sha256_of(data: bytes | bytearray) -> str:
    """The name of a blob."""
    return hashlib.sha256(data).hexdigest()


def gram_of(
    chunks: Chunks, bounds: Sequence[tuple[int, int]], contributors: Sequence[Contributor], codec: Codec, compared: int
) -> tuple[float, ...]:
    """About the Gram matrix of the contributors' outer gradients in these chunks, from a sample of them."""
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
