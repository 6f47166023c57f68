"""What one member brings to a round: its outer gradient, encoded once, and later what the outcome does to its weights.

The vector is cut into chunks of 1024 blocks, on a grid that all peers share and codecs code alone. The parts of an
attempt are runs of chunks, so a second attempt with other parts sends the very same bytes. A chunk has 66 KiB as int8,
256 KiB as fp32: small enough that a control frame never waits long behind one on a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from p2ptrain.algorithms.codec import CHUNK_BLOCKS, Codec
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step
from p2ptrain.errors import WireError
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import Record

# What top-k did not send counts a little less in each round after (SparseLoCo: error feedback with a moving average).
ERROR_DECAY = np.float32(0.95)
# Chunks handled in one visit to the worker thread: 1 MiB of int8.
CHUNKS_PER_VISIT = 16


def chunk_bounds(start: int, stop: int) -> list[tuple[int, int]]:
    """The chunks of blocks [start, stop); start lies on the grid."""
    assert start % CHUNK_BLOCKS == 0
    return [(low, min(low + CHUNK_BLOCKS, stop)) for low in range(start, stop, CHUNK_BLOCKS)]


def split_parts(num_blocks: int, reducers: int) -> list[tuple[int, int]]:
    """At most `reducers` runs of whole chunks, as equal as can be, that cover all blocks in order."""
    chunks = -(-num_blocks // CHUNK_BLOCKS)
    count = min(chunks, reducers)
    edges = [i * chunks // count * CHUNK_BLOCKS for i in range(count)] + [num_blocks]
    return [(edges[i], edges[i + 1]) for i in range(count)]


def check_parts(parts: list[tuple[int, int]], num_blocks: int) -> None:
    """Raises WireError unless the parts cover [0, num_blocks) in order, each starting on the grid."""
    position = 0
    for start, stop in parts:
        if start != position or stop <= start or start % CHUNK_BLOCKS:
            raise WireError(f"part [{start}, {stop}) does not continue at block {position}")
        position = stop
    if position != num_blocks:
        raise WireError(f"parts end at block {position} of {num_blocks}")


def check_record(record: Record, state: AnchorState) -> None:
    """Raises WireError unless this is a record whose outer step can be taken on a state, whoever sent it."""
    check_parts([(part.start, part.stop) for part in record.parts], state.num_blocks)
    if not record.contributors:
        raise WireError("a record without contributors")
    optimizer = OUTER_OPTIMIZERS.get(record.outer_optimizer)
    if optimizer is None or optimizer.num_moments > len(state.moments):
        raise WireError(f"a record with outer optimizer {record.outer_optimizer!r}")


@dataclass(slots=True)
class OwnContribution:
    """A snapshot on its way through a round.

    `buffer` holds the snapshot's weights until a chunk is encoded, then what its bytes decode to, and at the end
    (after `apply_outcome`) what must be added to the live weights: one vector from start to finish. With an error
    buffer it holds anchor − weights in between, so that the live weights come to stand on the new anchor: what was not
    sent is then in `next_error`, and no longer in the weights.

    Attributes:
        error: what earlier rounds did not send, (num_blocks, 64); only read. None where the weights keep it.
        next_error: what this one does not send; takes the place of `error` if the round commits with it.
    """

    buffer: torch.Tensor
    tokens: int
    steps: int
    run_step: int
    at_length: bool
    held_s: float
    chunks: dict[int, bytes]
    error: np.ndarray | None = None
    next_error: np.ndarray | None = None

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: list[tuple[int, int]]) -> None:
        """Encode these chunks of anchor − weights; chunks that were encoded before are left alone."""
        weights = self.buffer.numpy()
        for start, stop in bounds:
            if start in self.chunks:
                continue
            gradient = np.subtract(anchor[start:stop], weights[start:stop])
            if self.error is None or self.next_error is None:
                encoded = codec.encode(gradient)
                weights[start:stop] = codec.decode(encoded, stop - start)
            else:
                weights[start:stop] = gradient
                gradient += ERROR_DECAY * self.error[start:stop]
                encoded = codec.encode(gradient)
                self.next_error[start:stop] = np.subtract(gradient, codec.decode(encoded, stop - start))
            self.chunks[start] = encoded


def apply_outcome(
    state: AnchorState,
    codec: Codec,
    mean: bytes | bytearray,
    part: tuple[int, int],
    record: Record,
    buffer: np.ndarray | None,
) -> None:
    """Take the outer step on one part's blocks, in place: A, m ← step(A, m, decode(mean)).

    Args:
        mean: the part's encoded mean outer gradient, already verified by hash.
        record: says which step it is.
        buffer: a contributor's (num_blocks, 64), to which A′ − A is added; blocks that are only averaged become A′.
    """
    start, stop = part
    for low, high in chunk_bounds(start, stop):
        gradient = _decode_chunk(codec, mean, start, low, high)
        stepped = max(low, min(high, state.num_stepped))
        anchor, averaged = state.anchor[low:stepped], state.anchor[stepped:high]
        before = anchor.copy()
        outer_step(
            record.outer_optimizer, anchor, [moment[low:stepped] for moment in state.moments],
            gradient[: stepped - low], lr=record.outer_lr, momentum=record.outer_momentum, round_=record.round,
        )  # fmt: skip
        np.subtract(averaged, gradient[stepped - low :], out=averaged)
        if buffer is not None:
            buffer[low:stepped] += np.subtract(anchor, before, out=before)
            buffer[stepped:high] = averaged


def check_decodes(codec: Codec, mean: bytes | bytearray, part: tuple[int, int]) -> None:
    """Raises WireError unless every chunk of a part decodes: done before READY, so that no outcome half applies."""
    start, stop = part
    if len(mean) != codec.size_bytes(stop - start):
        raise WireError(f"part [{start}, {stop}) has {len(mean)} bytes")
    for low, high in chunk_bounds(start, stop):
        _decode_chunk(codec, mean, start, low, high)


def _decode_chunk(codec: Codec, mean: bytes | bytearray, start: int, low: int, high: int) -> np.ndarray:
    """Blocks [low, high) of a part that starts at block `start`."""
    coded = memoryview(mean)[codec.size_bytes(low - start) : codec.size_bytes(high - start)]
    return codec.decode(coded, high - low)
