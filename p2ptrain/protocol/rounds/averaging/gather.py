"""All-gather: every member sends its whole encoded outer gradient to all others, and each averages for itself.

One transfer less than with reducers, and the mean is not encoded. Each member exchanges bytes with all others, so this
is for two or three peers, and for sparse codecs, whose mean has as many values as all gradients together (SparseLoCo:
Sarfi et al., 2025). All add the same bytes in the order of the record, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.averaging.strategy import (
    Array,
    Blobs,
    Chunks,
    Conclusion,
    ReducedPart,
    gram_of,
    merge_of,
    sha256_of,
)
from p2ptrain.protocol.rounds.codecs import gradient_codec
from p2ptrain.protocol.rounds.grid import chunk_bounds
from p2ptrain.protocol.wire.messages import Contributor, Part, Record, Reduced, Roster, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# Blocks averaged in one visit to the worker thread: 1M values.
BLOCKS_PER_VISIT = 16 * 1024


class Gather:
    """Every reducer receives everything; a blob is one contributor's whole encoded outer gradient."""

    # A member that did not receive everything fetches the rest by hash, like a late member.
    needs_every_reducer = False

    def __init__(self, run: RunConfig) -> None:
        self._codec = gradient_codec(run)
        self._merge = merge_of(run)

    def plan(self, reducers: Sequence[PeerId], num_blocks: int) -> tuple[RosterPart, ...]:
        """The whole vector to each reducer."""
        return tuple(RosterPart(0, num_blocks, reducer, ()) for reducer in reducers)

    def check_plan(self, roster: Roster, num_blocks: int) -> None:
        reducers = [part.reducer for part in roster.parts]
        if any((part.start, part.stop, part.senders) != (0, num_blocks, ()) for part in roster.parts):
            raise WireError("a part that is not the whole vector from all members")
        if not reducers or len(set(reducers)) < len(reducers) or not set(reducers) <= set(roster.members):
            raise WireError("reducers that are not distinct members")

    def reduce(
        self, part: RosterPart, chunks: Chunks, contributors: Sequence[Contributor], compared: int
    ) -> ReducedPart:
        """Join each contributor's chunks to one blob, without averaging."""
        bounds = chunk_bounds(part.start, part.stop)
        gram = gram_of(chunks, bounds, contributors, self._codec, compared)
        wholes = [bytearray().join(chunks[c.peer_id].pop(start) for start, _ in bounds) for c in contributors]
        return ReducedPart([(sha256_of(whole), whole) for whole in wholes], gram)

    def conclude(
        self, plan: Sequence[RosterPart], contributors: Sequence[Contributor], reports: Mapping[int, Reduced]
    ) -> Conclusion | None:
        """One report is enough: members with other bytes fetch those in the record."""
        for i, report in sorted(reports.items()):
            if len(report.sha256s) == len(contributors):
                parts = (
                    Part(plan[i].start, plan[i].stop, sha256, c.peer_id)
                    for c, sha256 in zip(contributors, report.sha256s, strict=True)
                )
                return Conclusion(tuple(parts), (report.gram,))
        return None

    def check_record(self, record: Record, num_blocks: int) -> None:
        named = [(c.peer_id, 0, num_blocks) for c in record.contributors]
        if [(part.holder, part.start, part.stop) for part in record.parts] != named:
            raise WireError("a record whose parts are not its contributors' outer gradients")

    def size_bytes(self, record: Record, part: Part) -> int:
        return self._codec.size_bytes(part.stop - part.start)

    def spans(self, record: Record) -> list[tuple[int, int]]:
        stop = record.parts[0].stop
        return [(low, min(low + BLOCKS_PER_VISIT, stop)) for low in range(0, stop, BLOCKS_PER_VISIT)]

    def decode(self, record: Record, blobs: Blobs, start: int, stop: int) -> Array:
        low, high = self._codec.size_bytes(start), self._codec.size_bytes(stop)
        encoded = [
            (bytes(memoryview(blobs(part.sha256))[low:high]), c.weight)
            for part, c in zip(record.parts, record.contributors, strict=True)
        ]
        return self._merge(encoded, self._codec, stop - start)
