"""The interface of averaging strategies: who sends what to whom, how chunks are combined, what the mean is.

Every attempt has the same steps. The leader makes a *plan*: parts, each a range of blocks, its reducer and its senders.
Every sender sends its encoded chunks of the part to the reducer. Each reducer *reduces* its part to blobs of bytes, as
chunks arrive or when the leader has named the contributors, serves them by hash, and reports the hashes. From enough
reports the leader *concludes* the parts of the record. Members fetch the blobs in the record, and take the *mean*
from them, chunk by chunk.

Strategies are pure, so worker threads may use one at the same time. Peers with the same record get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.averaging import disjoint_mean, weighted_mean
from p2ptrain.algorithms.codec import Codec, Encoded
from p2ptrain.algorithms.robust import clipped_mean, geometric_median, trimmed_mean
from p2ptrain.protocol.wire.messages import Contributor, Join, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

Array = npt.NDArray[np.float32]
Blob = bytes | bytearray | memoryview
# The bytes of a blob, by its SHA-256.
Blobs = Callable[[str], Blob]
# The encoded chunks that a reducer holds: by member, then by first block.
Chunks = dict[PeerId, dict[int, Encoded]]
Plan = Sequence[RosterPart]
# A codec and the bytes that it decodes.
Encoding = tuple[Codec, Encoded]


@dataclass(frozen=True)
class Conclusion:
    """The parts of a record, and Gram matrices whose sum is that of the whole vectors: one empty if it is unknown."""

    parts: tuple[Part, ...]
    grams: tuple[tuple[float, ...], ...]


class Averaging(Protocol):
    """A stateless strategy, made from the run's settings.

    Attributes:
        reduces: whether a blob is what `reduce` makes of one part of several contributions, so that a false one is
            found by averaging them again. Blobs that are contributions are checked by their hash alone; the holder of
            each is its contributor.
    """

    @property
    def reduces(self) -> bool: ...

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], num_blocks: int) -> Plan:
        """Who reduces which blocks of whose outer gradients: at most one part for each member.

        Every member sends every block to a reducer at least: a contributor's weights land as if all of them were sent.
        Raises RoundFailedError if no plan is possible.

        Args:
            joins: the members, sorted, with the peers that each is linked to.
            avoided: members that reduce only if no other can.
        """
        ...

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        """Raises WireError unless `plan` could have made this plan. Its members have been checked."""
        ...

    def is_complete(self, plan: Plan, left: Collection[int]) -> bool:
        """Whether an attempt can succeed with the reducers of these parts (by number) alone."""
        ...

    def reduce(
        self, bounds: Sequence[tuple[int, int]], chunks: Chunks, contributors: Sequence[Contributor]
    ) -> Sequence[Blob]:
        """Combine the contributors' chunks of one part to blobs, whose hashes are reported in their order.

        Called in a worker thread.

        Args:
            bounds: the chunks of the part, in order.
            chunks: every chunk of the part for every contributor; removed, to free memory early.
            contributors: those that send this part.

        Raises:
            WireError: a mean that is not finite.
        """
        ...

    def merge(self, encoded: Sequence[tuple[Encoded, float]], num_blocks: int) -> bytes:
        """The encoded mean of one chunk: the contributors' encoded chunks with their weights. Only if it `reduces`.

        The blob that `reduce` makes of a part is the means of its chunks, in order. Raises WireError likewise.
        """
        ...

    def num_blobs(self, contributors: Sequence[Contributor]) -> int:
        """How many blobs `reduce` makes from the chunks of these contributors; other reports are refused."""
        ...

    def conclude(
        self, plan: Plan, contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        """The record's parts if these reports (by part number) suffice, else None."""
        ...

    def check_record(self, record: Record, num_blocks: int) -> None:
        """Raises WireError unless `mean` gives the whole mean from the record's parts."""
        ...

    def size_bytes(self, record: Record, part: Part) -> int:
        """Size of the blob of a record's part."""
        ...

    def spans(self, record: Record) -> list[tuple[int, int]]:
        """Ranges of whole chunks that cover the vector in order, each checked or stepped at a time."""
        ...

    def mean(self, record: Record, blobs: Blobs, start: int, stop: int) -> Encoding:
        """The mean outer gradient of one chunk, in a form that is not checked yet.

        Args:
            blobs: returns the bytes of a blob in the record, of size `size_bytes`.

        Raises:
            WireError: bytes that do not decode.
        """
        ...


Merge = Callable[[Sequence[tuple[Encoded, float]], Codec, int], Array]
MERGES: dict[str, Merge] = {
    "weighted": weighted_mean,
    "disjoint": disjoint_mean,
    "clipped": clipped_mean,
    "trimmed": trimmed_mean,
    "geometric": geometric_median,
}


def is_audited(run: RunConfig, averaging: Averaging) -> bool:
    """Whether members commit to their chunks by a Merkle root, so that reducers can be audited."""
    return run.audit_rate > 0 and averaging.reduces


def merge_of(run: RunConfig) -> Merge:
    """The mean in a run's settings, of one chunk of the grid at a time."""
    return MERGES[run.round_mean]
