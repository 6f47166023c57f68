"""Windows of text: a random stream for each peer to train on, read ahead in a thread, and fixed windows to evaluate on.

Unless the text is partitioned (`training/partitioning.py`), every peer draws windows from all of the text with its own
seed: peers come and go, and the parts of absent peers would otherwise never be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.corpus import Tokens

Batch = tuple[torch.Tensor, torch.Tensor]


class RandomWindows:
    """An endless stream of batches. Batch n is a function of (seed, n), so the state is the seed and the position."""

    def __init__(
        self, tokens: Tokens, *, context: int, batch_size: int, seed: int, spans: NDArray[np.int64] | None = None
    ) -> None:
        """
        Args:
            tokens: the text; kept, not copied.
            context: length of a window's inputs, in tokens.
            batch_size: windows per batch.
            seed: seeds the stream.
            spans: int64 (spans, 2), begin and end of the ranges of text to draw windows from; no window crosses a
                border, and all windows are equally likely. None for all of the text.

        Raises:
            ConfigError: the text, or every span of it, is shorter than one window.
        """
        _check_length(tokens, context, "train on")
        spans = np.array([[0, len(tokens)]]) if spans is None else spans
        windows = np.maximum(spans[:, 1] - spans[:, 0] - context, 0)
        if not windows.any():
            raise ConfigError(
                f"num_shards: each of the {len(spans)} pieces of text of this shard is shorter than one window of "
                f"{context + 1}; give more text, or start a run with fewer shards"
            )
        self._tokens = tokens
        # Window n starts at n plus the shift of its span.
        self._ends = np.cumsum(windows)
        self._shifts = spans[:, 0] - (self._ends - windows)
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._position = 0

    def next_batch(self) -> Batch:
        """Draw inputs and targets, int64 (batch_size, context) each; the targets are one token ahead."""
        generator = np.random.default_rng((self._seed, self._position))
        numbers = generator.integers(self._ends[-1], size=self._batch_size)
        starts = numbers + self._shifts[np.searchsorted(self._ends, numbers, side="right")]
        batch = _batch(self._tokens, starts, self._context)
        # Advance only now, so that a batch that cannot be read is tried again after a restart with better data.
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the stream that `state_dict` saved, with its seed and position."""
        self._seed, self._position = int(state["seed"]), int(state["position"])


def fixed_windows(tokens: Tokens, *, context: int, count: int) -> Batch:
    """Return `count` windows spread evenly over `tokens`, or fewer: as many as fit without overlap, at least one.

    All peers with the same held-out tokens evaluate on the same windows. Returns inputs and targets, int64 (windows,
    context) each. Raises ConfigError if `tokens` is shorter than one window.
    """
    _check_length(tokens, context, "hold out")
    count = min(count, (len(tokens) - 1) // context)
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return _batch(tokens, starts, context)


def _batch(tokens: Tokens, starts: NDArray[np.int64], context: int) -> Batch:
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


def _check_length(tokens: Tokens, context: int, purpose: str) -> None:
    if len(tokens) <= context:
        too_few = f"{len(tokens)} tokens to {purpose} are fewer than one window of {context + 1}"
        raise ConfigError(
            f"--data: {too_few}; give more text, or, for prepared data, a larger --held-out; or a shorter --context"
        )


class ReadAhead:
    """Reads each batch of a stream in a thread, while the one before is used. Batches and state are the same."""

    def __init__(self, windows: RandomWindows, *, pin: bool) -> None:
        """`pin`: put batches into pinned memory, from which a GPU copies while it computes."""
        self._windows = windows
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._next: Future[Batch] | None = None
        self._state = windows.state_dict()

    def next_batch(self) -> Batch:
        """The next batch; blocks if it is still being read. Raises ConfigError if tokens are beyond the vocabulary."""
        waiting = self._next or self._thread.submit(self._read)
        batch = waiting.result()
        # Keep the state after the returned batch, as the thread goes on to read the next one.
        self._state = self._windows.state_dict()
        self._next = self._thread.submit(self._read)
        return batch

    def state_dict(self) -> dict[str, int]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if self._next is not None:
            self._next.exception()  # wait for it
            self._next = None
        self._windows.load_state_dict(state)
        self._state = self._windows.state_dict()

    def _read(self) -> Batch:
        inputs, targets = self._windows.next_batch()
        return (inputs.pin_memory(), targets.pin_memory()) if self._pin else (inputs, targets)
