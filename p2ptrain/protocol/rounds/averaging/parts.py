"""Reducers: the vector is split into parts, and one member averages each part for all.

As in hivemind's averager (Ryabinin et al., Moshpit SGD, 2021), each member sends one encoded vector and receives one
mean, whatever the number of members. The mean is encoded again.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence

from p2ptrain.algorithms.codec import Encoded
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds import policy
from p2ptrain.protocol.rounds.averaging.strategy import Blob, Blobs, Chunks, Conclusion, Encoding, Plan, merge_of
from p2ptrain.protocol.rounds.grid import Grid, gradient_codec, mean_codec
from p2ptrain.protocol.wire.messages import Contributor, Join, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig


class Parts:
    """One reducer a part; a blob is the encoded mean of one part."""

    reduces = True

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._codec = gradient_codec(run)
        self._merge = merge_of(run)

    def plan(self, joins: Mapping[PeerId, Join], avoided: Collection[PeerId], num_blocks: int) -> Plan:
        """One part for each reducer, or for the best of them if the vector has fewer chunks."""
        reducers = policy.reducers_of(joins, avoided)
        bounds = Grid.of(num_blocks, self._codec).split(len(reducers))
        return [RosterPart(start, stop, reducers[i], ()) for i, (start, stop) in enumerate(bounds)]

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        Grid.of(num_blocks, self._codec).check_parts((part.start, part.stop) for part in roster.parts)
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
        return mean_codec(self._run, len(encoded)).encode(self._merge(encoded, self._codec, num_blocks))

    def num_blobs(self, contributors: Sequence[Contributor]) -> int:
        return 1

    def conclude(
        self, plan: Plan, contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        if len(reports) < len(plan):
            return None
        parts = (Part(p.start, p.stop, reports[i].digests[0], p.reducer) for i, p in enumerate(plan))
        return Conclusion(tuple(parts), tuple(reports[i].gram for i in sorted(reports)))

    def check_record(self, record: Record, num_blocks: int) -> None:
        Grid.of(num_blocks, self._codec).check_parts((part.start, part.stop) for part in record.parts)

    def size_bytes(self, record: Record, part: Part) -> int:
        return mean_codec(self._run, len(record.contributors)).size_bytes(part.stop - part.start)

    def spans(self, record: Record) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in record.parts]

    def mean(self, record: Record, blobs: Blobs, start: int, stop: int) -> Encoding:
        codec = mean_codec(self._run, len(record.contributors))
        part = record.parts[bisect.bisect_right(record.parts, start, key=lambda part: part.start) - 1]
        low, high = codec.size_bytes(start - part.start), codec.size_bytes(stop - part.start)
        return codec, memoryview(blobs(part.digest))[low:high]
