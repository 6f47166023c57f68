"""What a partner sends in one step: its encoded weights in order, and a sample of its anchor. Bounded, and checked."""

from __future__ import annotations

import math

import trio

from p2ptrain.algorithms.averaging import MAX_MEAN
from p2ptrain.algorithms.codec import Codec, is_within
from p2ptrain.algorithms.pairwise import Array, pairwise_step, sample_blocks, squared_distance
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.wire.messages import PairWeights
from p2ptrain.protocol.wire.transport import PeerId


class PartnerWeights:
    """The weights of one partner, as they come in.

    Attributes:
        sender: the partner, and the number of its step.
        heard_s: when the last chunk came, or the swap began.
        complete: set with the last chunk.
    """

    def __init__(self, sender: tuple[PeerId, int], codec: Codec, num_blocks: int, now: float) -> None:
        self.sender = sender
        self.heard_s = now
        self.complete = trio.Event()
        self._codec = codec
        self._bounds = Grid.of(num_blocks, codec).bounds(0, num_blocks)
        self._sampled = sample_blocks(num_blocks)
        self._chunks: list[bytes] = []

    def add(self, message: PairWeights, payload: bytes, now: float) -> None:
        """Keep the next chunk. Raises WireError unless it is that, and decodes."""
        if self.complete.is_set():
            raise WireError("weights of a partner beyond the last chunk")
        last = len(self._chunks) == len(self._bounds)
        start, stop = (self._bounds[-1][1], self._bounds[-1][1]) if last else self._bounds[len(self._chunks)]
        if message.start != start:
            raise WireError(f"weights of a partner from block {message.start}, not {start}")
        self._codec.check(payload, len(self._sampled) if last else stop - start)
        self._chunks.append(payload)
        self.heard_s = now
        if last:
            self.complete.set()

    def distance(self, anchor: Array) -> float:
        """The Euclidean distance from our anchor. Call it in a worker thread. Raises WireError if it is impossible."""
        square = 0.0
        for (start, stop), chunk in zip(self._bounds, self._chunks, strict=False):
            square += squared_distance(anchor[start:stop], self._decode(chunk, stop - start))
        return math.sqrt(square)

    def anchor_sample(self) -> Array:
        """The blocks `sample_blocks` of its anchor before the step. Raises WireError if they cannot be any."""
        return self._decode(self._chunks[-1], len(self._sampled))

    def _decode(self, chunk: bytes, num_blocks: int) -> Array:
        decoded = self._codec.decode(chunk, num_blocks)
        if not is_within(decoded, MAX_MEAN):
            raise WireError(f"weights of a partner beyond {MAX_MEAN:g}")
        return decoded

    def step(self, anchor: Array, moment: Array, own: Array, *, lr: float, momentum: float, scale: float) -> None:
        """Take the step with these weights, in place; `own` becomes the change. Call it in a worker thread."""
        for (start, stop), chunk in zip(self._bounds, self._chunks, strict=False):
            decoded = self._codec.decode(chunk, stop - start)
            vectors = anchor[start:stop], moment[start:stop], own[start:stop], decoded
            pairwise_step(*vectors, lr=lr, momentum=momentum, scale=scale)
