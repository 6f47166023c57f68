"""All-gather: every member sends its whole encoded outer gradient to all others, and each averages for itself.

One transfer less than with reducers, and the mean is not encoded. Each member exchanges bytes with all others, so this
is for two or three peers, and for sparse codecs, whose mean has as many values as all gradients together (SparseLoCo:
Sarfi et al., 2025). All add the same bytes in the order of the record, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from p2ptrain.algorithms.codec import Encoded, codec
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds import policy
from p2ptrain.protocol.rounds.averaging.strategy import Blob, Blobs, Chunks, Conclusion, Encoding, Plan, merge_of
from p2ptrain.protocol.rounds.grid import gradient_codec
from p2ptrain.protocol.wire.messages import Contributor, Join, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

NONE = codec("none")
# Blocks checked or stepped at a time: 1M values.
BLOCKS_PER_VISIT = 16 * 1024


class Gather:
    """Every reducer receives everything; a blob is one contributor's whole encoded outer gradient."""

    reduces = False

    def __init__(self, run: RunConfig) -> None:
        self._codec = gradient_codec(run)
        self._merge = merge_of(run)

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], num_blocks: int) -> Plan:
        """The whole vector to each reducer."""
        return [RosterPart(0, num_blocks, reducer, ()) for reducer in policy.reducers_of(joins, avoided)]

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        if {(part.start, part.stop, part.senders) for part in roster.parts} != {(0, num_blocks, ())}:
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
        """One report is enough: members with other bytes fetch those in the record."""
        if not reports:
            return None
        i, report = min(reports.items())
        parts = (
            Part(plan[i].start, plan[i].stop, digest, c.peer_id)
            for c, digest in zip(contributors, report.digests, strict=True)
        )
        return Conclusion(tuple(parts), (report.gram,))

    def check_record(self, record: Record, num_blocks: int) -> None:
        named = [(c.peer_id, 0, num_blocks) for c in record.contributors]
        if [(part.holder, part.start, part.stop) for part in record.parts] != named:
            raise WireError("a record whose parts are not its contributors' outer gradients")

    def size_bytes(self, record: Record, part: Part) -> int:
        return self._codec.size_bytes(part.stop - part.start)

    def spans(self, record: Record) -> list[tuple[int, int]]:
        stop = record.parts[0].stop
        return [(low, min(low + BLOCKS_PER_VISIT, stop)) for low in range(0, stop, BLOCKS_PER_VISIT)]

    def mean(self, record: Record, blobs: Blobs, start: int, stop: int) -> Encoding:
        low, high = self._codec.size_bytes(start), self._codec.size_bytes(stop)
        encoded = [
            (memoryview(blobs(part.digest))[low:high], c.weight)
            for part, c in zip(record.parts, record.contributors, strict=True)
        ]
        values = self._merge(encoded, self._codec, stop - start)
        return NONE, values.astype("<f4", copy=False).reshape(-1).view(np.uint8).data
