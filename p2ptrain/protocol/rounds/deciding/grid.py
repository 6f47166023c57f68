"""How outer gradients and their mean are cut into chunks and encoded: the grid, the same on every peer, and the codecs.

Each chunk is encoded alone, and parts consist of whole chunks, so that another attempt with another plan sends the same
bytes. A chunk has 1024 blocks: 66 KiB as int8, 256 KiB as fp32, so that control frames never wait long behind one on a
slow link. Of a large model it has up to 4096 (int8: 264 KiB), as long as it is no larger than one of fp32, because each
chunk costs many calls in Python: a round of 100M parameters took 20 to 36 % less CPU (docs/log/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2ptrain.algorithms.codec import CHUNK_BLOCKS, Codec, codec
from p2ptrain.algorithms.merkle import root_of
from p2ptrain.errors import WireError
from p2ptrain.settings.config import RunConfig

# From so many blocks on (16.8M values) a model is large (guess).
LARGE_BLOCKS = 2**18
# One of fp32 with its 1024 blocks has nearly as much, and passes the slowest links.
MOST_CHUNK_BYTES = 264 * 1024
# The mean has no error buffer: reducers change, and an audit makes the same bytes again. So it needs a finer codec.
MEAN_OF = {"topk": "int4", "int2": "int4"}


@dataclass(frozen=True)
class Grid:
    """The chunks of a vector of `num_blocks` blocks, each of `chunk_blocks` blocks, the last one perhaps shorter."""

    num_blocks: int
    chunk_blocks: int = CHUNK_BLOCKS

    @classmethod
    def of(cls, num_blocks: int, codec: Codec) -> Grid:
        """That of a vector whose chunks have this codec."""
        larger = (4 * CHUNK_BLOCKS, 2 * CHUNK_BLOCKS) if num_blocks >= LARGE_BLOCKS else ()
        fitting = (blocks for blocks in larger if codec.size_bytes(blocks) <= MOST_CHUNK_BYTES)
        return cls(num_blocks, next(fitting, CHUNK_BLOCKS))

    @property
    def num_chunks(self) -> int:
        return -(-self.num_blocks // self.chunk_blocks)

    def numbers(self, start: int, stop: int) -> tuple[int, int]:
        """The numbers [first, end) of the chunks of blocks [start, stop)."""
        return start // self.chunk_blocks, -(-stop // self.chunk_blocks)

    def bounds(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The chunks of blocks [start, stop); start lies on the grid."""
        assert start % self.chunk_blocks == 0
        return [(low, min(low + self.chunk_blocks, stop)) for low in range(start, stop, self.chunk_blocks)]

    def split(self, reducers: int) -> list[tuple[int, int]]:
        """At most `reducers` runs of whole chunks, as equal as can be, that cover all blocks in order."""
        count = min(self.num_chunks, reducers)
        edges = [i * self.num_chunks // count * self.chunk_blocks for i in range(count)] + [self.num_blocks]
        return [(edges[i], edges[i + 1]) for i in range(count)]

    def check_parts(self, parts: Iterable[tuple[int, int]]) -> None:
        """Raises WireError unless the parts cover all blocks in order, each starting on the grid."""
        position = 0
        for start, stop in parts:
            if start != position or stop <= start or start % self.chunk_blocks:
                raise WireError(f"part [{start}, {stop}) does not continue at block {position}")
            position = stop
        if position != self.num_blocks:
            raise WireError(f"parts end at block {position} of {self.num_blocks}")

    def check_chunk(self, start: int, stop: int) -> None:
        """Raises WireError unless [start, stop) is one chunk."""
        is_chunk = 0 <= start < self.num_blocks and stop == min(start + self.chunk_blocks, self.num_blocks)
        if start % self.chunk_blocks or not is_chunk:
            raise WireError(f"[{start}, {stop}) is no chunk of a vector of {self.num_blocks} blocks")

    def check_leaves(self, leaves: Sequence[bytes], start: int, proof: Sequence[bytes], root: bytes) -> None:
        """Raises WireError unless the proof leads from these leaf hashes, of chunks from `start` on, to the root."""
        if root_of(leaves, start // self.chunk_blocks, self.num_chunks, proof) != root:
            raise WireError("its chunks are not those that it committed to")


def gradient_codec(run: RunConfig) -> Codec:
    """The codec of one peer's outer gradient."""
    return codec(run.round_codec, prune_fraction=run.prune_fraction, density=run.round_density)


def mean_codec(run: RunConfig) -> Codec:
    """The codec of the mean, if it is encoded again."""
    return codec(MEAN_OF.get(run.round_codec, run.round_codec))
