"""Windows of text: each peer's own random stream to train on, and the fixed ones that all peers are measured on.

A peer's shard is the stream of windows that its seed draws. Peers come and go, so the corpus is not cut into k
parts, of which those of absent peers would never be seen: every peer draws windows from all of it, independently.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError


class RandomWindows:
    """An endless stream of batches. Batch n is a function of (seed, n): the position is all its state."""

    def __init__(self, tokens: NDArray[np.uint8], *, context: int, batch_size: int, seed: int) -> None:
        """`tokens` is kept, not copied. Raises ConfigError when it is shorter than one window."""
        _check_length(tokens, context, "train on")
        self._tokens = tokens
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 (batch_size, context) each; the targets are one character ahead."""
        generator = np.random.default_rng((self._seed, self._position))
        self._position += 1
        starts = generator.integers(len(self._tokens) - self._context, size=self._batch_size)
        return _batch(self._tokens, starts, self._context)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another stream stopped, with its seed."""
        self._seed, self._position = int(state["seed"]), int(state["position"])


def fixed_windows(tokens: NDArray[np.uint8], *, context: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` windows spread evenly over `tokens`: inputs and targets, int64 (count, context) each.

    Raises:
        ConfigError: `tokens` is shorter than one window.
    """
    _check_length(tokens, context, "hold out")
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return _batch(tokens, starts, context)


def _batch(tokens: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


def _check_length(tokens: NDArray[np.uint8], context: int, purpose: str) -> None:
    if len(tokens) <= context:
        raise ConfigError(
            f"--data: {len(tokens)} characters to {purpose} are fewer than one window of {context + 1}; give more text"
        )
