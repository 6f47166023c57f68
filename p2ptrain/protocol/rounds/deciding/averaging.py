"""Averaging strategies: who sends what to whom, how chunks are combined, what the mean is. Pure.

Every attempt has the same steps. The leader makes a *plan*: parts, each a range of blocks, its reducer and its senders.
Every sender sends its encoded chunks of the part to the reducer. Each reducer *reduces* its part to blobs of bytes, as
chunks arrive or when the leader has named the contributors, serves them by hash, and reports the hashes. From enough
reports the leader *concludes* the parts of the record. Members fetch the blobs in the record, and take the *mean*
from them, chunk by chunk.

Worker threads may use one strategy at the same time. Peers with the same record get the same bits. A new strategy is a
class here, a line in `STRATEGIES`, and its name in `config.AVERAGINGS`. `policy` decides contributors and weights.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.averaging import MAX_MEAN, disjoint_mean, weighted_mean
from p2ptrain.algorithms.codec import Codec, Encoded, codec
from p2ptrain.algorithms.robust import clipped_mean, geometric_median, trimmed_mean
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding import policy
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec, mean_codec
from p2ptrain.protocol.wire.messages import Contributor, Join, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

NONE = codec("none")
# Blocks checked or stepped at a time: 1M values.
BLOCKS_PER_VISIT = 16 * 1024

Array = npt.NDArray[np.float32]
Blob = bytes | bytearray | memoryview
# The bytes of a blob, by its hash.
Blobs = Callable[[str], Blob]
# The encoded chunks that a reducer holds: by member, then by first block.
Chunks = dict[PeerId, dict[int, Encoded]]
Plan = Sequence[RosterPart]
# A codec and the bytes that it decodes.
Encoding = tuple[Codec, Encoded]


@dataclass(frozen=True)
class Conclusion:
    """The parts of a record, and Gram matrices to be added up. If one is empty, the sum is unknown."""

    parts: tuple[Part, ...]
    grams: tuple[tuple[float, ...], ...]


class Averaging(Protocol):
    """A stateless strategy, made from the run's settings.

    Attributes:
        reduces: whether a blob is computed from several contributions, so that an audit can compute it again. Else each
            blob is one contribution, held by its contributor, and is checked by its hash alone.
    """

    @property
    def reduces(self) -> bool: ...

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], grid: Grid) -> Plan:
        """Who reduces which blocks of whose outer gradients: at most one part for each member.

        Every block of every member must reach some reducer: the landing assumes that all were sent.
        Raises RoundFailedError if no plan is possible.

        Args:
            joins: the members, sorted, with the peers that each is linked to.
            avoided: members that reduce only if no other can.
            grid: of this round.
        """
        ...

    def check_plan(self, roster: Roster, grid: Grid) -> None:
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

    def check_record(self, record: Record, grid: Grid) -> None:
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


class Parts:
    """The vector is split into parts, and one member averages each part for all. A blob is the encoded mean of a part.

    As in hivemind's averager (Ryabinin et al., Moshpit SGD, 2021), each member sends one encoded vector and receives
    one mean, whatever the number of members. The mean is encoded again.
    """

    reduces = True

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._codec = gradient_codec(run)
        self._merge = merge_of(run)

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], grid: Grid) -> Plan:
        """One part for each reducer, or for the best of them if the vector has fewer chunks."""
        reducers = policy.reducers_of(joins, avoided)
        bounds = grid.split(len(reducers))
        return [RosterPart(start, stop, reducers[i], ()) for i, (start, stop) in enumerate(bounds)]

    def check_plan(self, roster: Roster, grid: Grid) -> None:
        grid.check_parts((part.start, part.stop) for part in roster.parts)
        if any(part.senders for part in roster.parts):
            raise WireError("a part that only some members send")

    def is_complete(self, plan: Plan, left: Collection[int]) -> bool:
        return len(left) == len(plan)

    def reduce(
        self, bounds: Sequence[tuple[int, int]], chunks: Chunks, contributors: Sequence[Contributor]
    ) -> Sequence[Blob]:
        means = (
            self.merge([(chunks[c.peer_id].pop(start), c.weight) for c in contributors], stop - start)
            for start, stop in bounds
        )
        return [b"".join(means)]

    def merge(self, encoded: Sequence[tuple[Encoded, float]], num_blocks: int) -> bytes:
        return mean_codec(self._run).encode(self._merge(encoded, self._codec, num_blocks))

    def num_blobs(self, contributors: Sequence[Contributor]) -> int:
        return 1

    def conclude(
        self, plan: Plan, contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        if len(reports) < len(plan):
            return None
        parts = (Part(p.start, p.stop, reports[i].digests[0], p.reducer) for i, p in enumerate(plan))
        return Conclusion(tuple(parts), tuple(reports[i].gram for i in sorted(reports)))

    def check_record(self, record: Record, grid: Grid) -> None:
        grid.check_parts((part.start, part.stop) for part in record.parts)

    def size_bytes(self, record: Record, part: Part) -> int:
        return mean_codec(self._run).size_bytes(part.stop - part.start)

    def spans(self, record: Record) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in record.parts]

    def mean(self, record: Record, blobs: Blobs, start: int, stop: int) -> Encoding:
        codec = mean_codec(self._run)
        part = record.parts[bisect.bisect_right(record.parts, start, key=lambda part: part.start) - 1]
        low, high = codec.size_bytes(start - part.start), codec.size_bytes(stop - part.start)
        return codec, memoryview(blobs(part.digest))[low:high]


class Gather:
    """Every member sends its whole encoded outer gradient to all others, and each averages for itself. A blob is one.

    One transfer less than with reducers, and the mean is not encoded. Each member exchanges bytes with all others, so
    this is for two or three peers, and for sparse codecs, whose mean has as many values as all gradients together
    (SparseLoCo: Sarfi et al., 2025). All add the same bytes in the order of the record, so results are bit-identical.
    """

    reduces = False

    def __init__(self, run: RunConfig) -> None:
        self._codec = gradient_codec(run)
        self._merge = merge_of(run)

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], grid: Grid) -> Plan:
        """All blocks to each reducer."""
        return [RosterPart(grid.first, grid.end, reducer, ()) for reducer in policy.reducers_of(joins, avoided)]

    def check_plan(self, roster: Roster, grid: Grid) -> None:
        if {(part.start, part.stop, part.senders) for part in roster.parts} != {(grid.first, grid.end, ())}:
            raise WireError("a plan whose parts are not the whole vector from all members")

    def is_complete(self, plan: Plan, left: Collection[int]) -> bool:
        """One reducer is enough: members that lack chunks fetch them by hash, like a late member."""
        return bool(left)

    def reduce(
        self, bounds: Sequence[tuple[int, int]], chunks: Chunks, contributors: Sequence[Contributor]
    ) -> Sequence[Blob]:
        """Join each contributor's chunks to one blob, without averaging."""
        return [bytearray().join(chunks[c.peer_id].pop(start) for start, _ in bounds) for c in contributors]

    def merge(self, encoded: Sequence[tuple[Encoded, float]], num_blocks: int) -> bytes:
        raise NotImplementedError("all-gather reduces nothing")

    def num_blobs(self, contributors: Sequence[Contributor]) -> int:
        return len(contributors)

    def conclude(
        self, plan: Plan, contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        """One report is enough (`policy.counted_reports`): members with other bytes fetch those in the record."""
        if not reports:
            return None
        i, report = min(reports.items())
        parts = (
            Part(plan[i].start, plan[i].stop, digest, c.peer_id)
            for c, digest in zip(contributors, report.digests, strict=True)
        )
        return Conclusion(tuple(parts), (report.gram,))

    def check_record(self, record: Record, grid: Grid) -> None:
        named = [(c.peer_id, grid.first, grid.end) for c in record.contributors]
        if [(part.holder, part.start, part.stop) for part in record.parts] != named:
            raise WireError("a record whose parts are not its contributors' outer gradients")

    def size_bytes(self, record: Record, part: Part) -> int:
        return self._codec.size_bytes(part.stop - part.start)

    def spans(self, record: Record) -> list[tuple[int, int]]:
        start, stop = record.parts[0].start, record.parts[0].stop
        return [(low, min(low + BLOCKS_PER_VISIT, stop)) for low in range(start, stop, BLOCKS_PER_VISIT)]

    def mean(self, record: Record, blobs: Blobs, start: int, stop: int) -> Encoding:
        first = record.parts[0].start
        low, high = self._codec.size_bytes(start - first), self._codec.size_bytes(stop - first)
        encoded = [
            (memoryview(blobs(part.digest))[low:high], c.weight)
            for part, c in zip(record.parts, record.contributors, strict=True)
        ]
        values = self._merge(encoded, self._codec, stop - start)
        return NONE, values.astype("<f4", copy=False).reshape(-1).view(np.uint8).data


STRATEGIES: dict[str, Callable[[RunConfig], Averaging]] = {"parts": Parts, "gather": Gather}


def averaging_of(run: RunConfig) -> Averaging:
    """The strategy in a run's settings; with pairwise steps, that of the run's one round."""
    return (Parts if run.is_pairwise else STRATEGIES[run.averaging])(run)


def check_decodes(
    averaging: Averaging, record: Record, blobs: Blobs, num_stepped: int, chunk: tuple[int, int]
) -> float:
    """Raises WireError unless a chunk of the mean decodes to values that leave anchor and moments finite.

    Returns the squared norm of the mean outer gradient in it, of the vector's first `num_stepped` blocks only.

    Called before READY, so that the step cannot fail. All peers decode the same bits, so all decide the same. The norm
    is for this peer only (`MeanGuard`).
    """
    start, stop = chunk
    codec, mean = averaging.mean(record, blobs, start, stop)
    return codec.squared_norm(mean, stop - start, max(0, num_stepped - start), MAX_MEAN)
