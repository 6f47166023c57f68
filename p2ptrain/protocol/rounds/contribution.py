"""What one member brings to a round: its outer gradient, encoded once, and later what the outcome does to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from p2ptrain.algorithms.codec import Codec

# What top-k did not send counts a little less in each round after (SparseLoCo: error feedback with a moving average).
ERROR_DECAY = np.float32(0.95)
# Chunks handled in one visit to the worker thread: 1 MiB of int8.
CHUNKS_PER_VISIT = 16


@dataclass(slots=True)
class OwnContribution:
    """A snapshot on its way through a round.

    `buffer` holds the snapshot's weights until a chunk is encoded, then what its bytes decode to, and at the end
    (after `commit.step_chunks`) what must be added to the live weights: one vector from start to finish. With an error
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
    chunks: dict[int, bytes] = field(default_factory=dict)
    error: np.ndarray | None = None
    next_error: np.ndarray | None = None

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: list[tuple[int, int]]) -> None:
        """Encode these chunks of anchor − weights; chunks that were encoded before are left alone.

        Heavy: call it in a worker thread. Raises ValueError when weights or anchor are not finite.
        """
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
