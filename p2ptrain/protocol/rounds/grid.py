"""The grid of chunks of outer gradients: 1024 blocks each, the same on every peer.

Each chunk is encoded alone, and parts consist of whole chunks, so that another attempt with another plan sends the same
bytes. A chunk has 66 KiB as int8, 256 KiB as fp32: control frames never wait long behind one on a slow link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2ptrain.algorithms.codec import CHUNK_BLOCKS
from p2ptrain.algorithms.merkle import root_of
from p2ptrain.errors import WireError


def num_chunks(num_blocks: int) -> int:
    """How many chunks the first `num_blocks` blocks have, the last of them perhaps shorter."""
    return -(-num_blocks // CHUNK_BLOCKS)


def chunk_range(start: int, stop: int) -> tuple[int, int]:
    """The numbers [first, end) of the chunks of blocks [start, stop)."""
    return start // CHUNK_BLOCKS, num_chunks(stop)


def chunk_bounds(start: int, stop: int) -> list[tuple[int, int]]:
    """The chunks of blocks [start, stop); start lies on the grid."""
    assert start % CHUNK_BLOCKS == 0
    return [(low, min(low + CHUNK_BLOCKS, stop)) for low in range(start, stop, CHUNK_BLOCKS)]


def split_parts(num_blocks: int, reducers: int) -> list[tuple[int, int]]:
    """At most `reducers` runs of whole chunks, as equal as can be, that cover all blocks in order."""
    chunks = num_chunks(num_blocks)
    count = min(chunks, reducers)
    edges = [i * chunks // count * CHUNK_BLOCKS for i in range(count)] + [num_blocks]
    return [(edges[i], edges[i + 1]) for i in range(count)]


def check_parts(parts: Iterable[tuple[int, int]], num_blocks: int) -> None:
    """Raises WireError unless the parts cover [0, num_blocks) in order, each starting on the grid."""
    position = 0
    for start, stop in parts:
        if start != position or stop <= start or start % CHUNK_BLOCKS:
            raise WireError(f"part [{start}, {stop}) does not continue at block {position}")
        position = stop
    if position != num_blocks:
        raise WireError(f"parts end at block {position} of {num_blocks}")


def check_chunk(start: int, stop: int, num_blocks: int) -> None:
    """Raises WireError unless [start, stop) is one chunk of the grid."""
    if start % CHUNK_BLOCKS or not 0 <= start < num_blocks or stop != min(start + CHUNK_BLOCKS, num_blocks):
        raise WireError(f"[{start}, {stop}) is no chunk of a vector of {num_blocks} blocks")


def check_leaves(leaves: Sequence[bytes], start: int, num_blocks: int, proof: Sequence[bytes], root: bytes) -> None:
    """Raises WireError unless the proof leads from these leaf hashes, of the chunks from block `start` on, to the root.

    Args:
        num_blocks: of the whole vector.
    """
    if root_of(leaves, start // CHUNK_BLOCKS, num_chunks(num_blocks), proof) != root:
        raise WireError("its chunks are not those that it committed to")
