"""Reads the next batch in a thread while the model trains on this one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from p2ptrain.training.data.windows import RandomWindows

Batch = tuple[torch.Tensor, torch.Tensor]


class ReadAhead:
    """The batches of a stream, each read while the one before is used. Same batches, same state as without it."""

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
        # The state after the batch that is returned: the thread is already reading another one.
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
