"""How outer gradients and their mean are cut into chunks and encoded: the grid, the same on every peer, and the codecs.

Each chunk is encoded alone, and parts consist of whole chunks, so that another attempt with another plan sends the same
bytes. A chunk has 1024 blocks: 66 KiB as int8, 256 KiB as fp32, so that control frames never wait long behind one on a
slow link. Of a large model it has up to 4096 (int8: 264 KiB), as long as it is no larger than one of fp32, because each
chunk costs many calls in Python: a round of 100M parameters took 20 to 36 % less CPU (docs/log/).

With `round_sections` a round averages one section of the vector, and the next round the next one (Streaming DiLoCo:
Douillard et al., 2025). A section has fewer bytes, so it lands sooner, and what lands late costs loss
(docs/evidence/late.md). The run's last round averages all, so that all peers end with the same weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2ptrain.algorithms.codec import CHUNK_BLOCKS, Codec, codec
from p2ptrain.algorithms.merkle import root_of
from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import Head, Record
from p2ptrain.settings.config import RunConfig

# From so many blocks on (16.8M values) a model is large (guess).
LARGE_BLOCKS = 2**18
# One of fp32 with its 1024 blocks has nearly as much, and passes the slowest links.
MOST_CHUNK_BYTES = 264 * 1024
# The mean has no error buffer: reducers change, and an audit makes the same bytes again. So it needs a finer codec.
MEAN_OF = {"topk": "int4", "int2": "int4"}


@dataclass(frozen=True)
class Grid:
    """The chunks of blocks [first, end) of a vector, each of `chunk_blocks` blocks, the last one perhaps shorter.

    `section`: the number of the section that these blocks are; None for the whole vector.
    """

    first: int
    end: int
    chunk_blocks: int = CHUNK_BLOCKS
    section: int | None = None

    @classmethod
    def of(cls, num_blocks: int, codec: Codec) -> Grid:
        """That of a whole vector whose chunks have this codec."""
        larger = (4 * CHUNK_BLOCKS, 2 * CHUNK_BLOCKS) if num_blocks >= LARGE_BLOCKS else ()
        fitting = (blocks for blocks in larger if codec.size_bytes(blocks) <= MOST_CHUNK_BYTES)
        return cls(0, num_blocks, next(fitting, CHUNK_BLOCKS))

    @property
    def num_blocks(self) -> int:
        return self.end - self.first

    @property
    def num_chunks(self) -> int:
        return -(-self.num_blocks // self.chunk_blocks)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """All chunks, in order."""
        return self.bounds(self.first, self.end)

    def holds(self, other: Grid) -> bool:
        """Whether all blocks of another grid are here."""
        return self.first <= other.first and other.end <= self.end

    def numbers(self, start: int, stop: int) -> tuple[int, int]:
        """The numbers [first, end) of the chunks of blocks [start, stop)."""
        return (start - self.first) // self.chunk_blocks, -(-(stop - self.first) // self.chunk_blocks)

    def bounds(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The chunks of blocks [start, stop); start lies on the grid."""
        assert (start - self.first) % self.chunk_blocks == 0
        return [(low, min(low + self.chunk_blocks, stop)) for low in range(start, stop, self.chunk_blocks)]

    def split(self, reducers: int) -> list[tuple[int, int]]:
        """At most `reducers` runs of whole chunks, as equal as can be, that cover all blocks in order."""
        count = min(self.num_chunks, reducers)
        edges = [self.first + i * self.num_chunks // count * self.chunk_blocks for i in range(count)]
        return list(itertools.pairwise([*edges, self.end]))

    def check_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        """Raises WireError unless the parts cover all blocks in order, each starting on the grid."""
        position = self.first
        for start, stop in parts:
            if start != position or stop <= start or (start - self.first) % self.chunk_blocks:
                raise WireError(f"part [{start}, {stop}) does not continue at block {position}")
            position = stop
        if position != self.end:
            raise WireError(f"parts end at block {position}, not {self.end}")

    def check_chunk(self, start: int, stop: int) -> None:
        """Raises WireError unless [start, stop) is one chunk."""
        is_chunk = self.first <= start < self.end and stop == min(start + self.chunk_blocks, self.end)
        if (start - self.first) % self.chunk_blocks or not is_chunk:
            raise WireError(f"[{start}, {stop}) is no chunk of blocks [{self.first}, {self.end})")

    def check_leaves(self, leaves: Sequence[bytes], start: int, proof: Sequence[bytes], root: bytes) -> None:
        """Raises WireError unless the proof leads from these leaf hashes, of chunks from `start` on, to the root."""
        if root_of(leaves, (start - self.first) // self.chunk_blocks, self.num_chunks, proof) != root:
            raise WireError("its chunks are not those that it committed to")


@dataclass(frozen=True)
class Grids:
    """The grids of a run's rounds: of the whole vector, and of each section in turn; one if it has no sections."""

    whole: Grid
    sections: tuple[Grid, ...]

    @classmethod
    def of(cls, num_blocks: int, sections: Sequence[tuple[int, int]], codec: Codec) -> Grids:
        """Those of a vector with these sections, each as its blocks [first, end); with none there is one, the whole."""
        whole = Grid.of(num_blocks, codec)
        cut = (Grid(*blocks, whole.chunk_blocks, number) for number, blocks in enumerate(sections))
        return cls(whole, tuple(cut) or (whole,))

    def of_round(self, run: RunConfig, head: Head) -> Grid:
        """The grid of the round after `head`."""
        return self.whole if averages_all(run, head) else self.sections[(head.round + 1) % len(self.sections)]

    def of_record(self, record: Record) -> Grid:
        """The grid that a record claims. Its parts are checked by `check_record`."""
        section = self.sections[record.round % len(self.sections)]
        covers_all = bool(record.parts) and (record.parts[0].start, record.parts[-1].stop) == (0, self.whole.end)
        return self.whole if covers_all else section


def averages_all(run: RunConfig, head: Head) -> bool:
    """Whether the round after `head` averages the whole vector: without sections, or as it may be the run's last.

    With a shrinking H there may be two such rounds.
    """
    return run.round_sections == 1 or 0 < run.total_steps <= head.run_step + run.sync_every


def gradient_codec(run: RunConfig) -> Codec:
    """The codec of one peer's outer gradient."""
    return codec(run.round_codec, prune_fraction=run.prune_fraction, density=run.round_density)


def mean_codec(run: RunConfig) -> Codec:
    """The codec of the mean, if it is encoded again."""
    return codec(MEAN_OF.get(run.round_codec, run.round_codec))
