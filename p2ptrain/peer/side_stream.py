"""Work that a GPU does beside training: a second stream, with events that tell when the work is done.

Kernels and copies that are queued on one stream run in order, and those of two streams side by side. PyTorch's rules
that this file keeps (notes on CUDA semantics, and the docs of `Tensor.record_stream`):

- A copy between host and device is only asynchronous if the host memory is pinned and `non_blocking` is given, if both
  sides are contiguous, and if their dtypes are equal. Else torch copies through memory of its own, and waits.
- The allocator gives freed memory of a tensor to the next one of the *same stream* at once. A tensor that another
  stream uses must be held until that stream is done; `Pending` does so.
- The host may read or change host memory of a copy only after an event that was recorded after the copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

# What was asked about the device's memory counts for so long: torch and the driver take a tenth of a step's exchange to
# say it (measured).
_ASK_EVERY_S = 1.0


class Pending(Protocol):
    """Work that was queued. Hold it until it is done: it holds the tensors in use."""

    @property
    def done(self) -> bool:
        """Whether the work is done. Never blocks."""

    def wait(self) -> None:
        """Block until the work is done. What the caller queues on the training stream after this comes after it."""


class SideStream(Protocol):
    """A stream beside the one that the caller queues its own work on: the training stream, the same at each call."""

    @property
    def device(self) -> torch.device: ...

    def run(
        self, work: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> Pending:
        """Queue `work` after all that is queued on the training stream now.

        Args:
            work: queues kernels and copies that wait for nothing. It must not return or store tensors that
                it allocates.
            reads: what it reads. Until it is done nobody may change these, also not by work on the training stream.
            writes: what it writes. Until it is done nobody may read or change these.
        """

    def host(self, *shape: int) -> torch.Tensor:
        """New float32 host memory, pinned if there is enough of it. Any thread may call it."""

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, or a copy of them in pinned memory. Any thread may call it."""

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve memory of the device that training leaves at its peak so far; False if there is not enough.

        A reservation lasts until free memory is asked for again, after a second at most.
        """


class CudaSideStream:
    """A stream of CUDA, or of ROCm, which torch calls CUDA too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # An int, because torch resolves a torch.device to its index in Python on every call.
        assert device.index is not None, "a tensor's device has one"
        self._index = device.index
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peak_bytes = self._room_bytes = 0
        self._ask_again_s = 0.0
        self._said_unpinned = False

    def run(
        self, work: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        try:
            with torch.cuda.stream(self._stream):
                work()
                event = self._stream.record_event()
        except BaseException:
            # Nobody holds the memory of what was queued: training may only use it again once that is done.
            torch.cuda.current_stream(self._index).wait_stream(self._stream)
            raise
        return _Recorded(event, self._index, (*reads, *writes))

    def host(self, *shape: int) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._note_unpinned(error)
            # Filled, so that its pages are allocated here and not in the thread that copies to it.
            return torch.empty(shape, dtype=torch.float32, device="cpu").fill_(0.0)

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        # torch keeps the memory of a pinned tensor that was freed until the copies from it are done.
        try:
            return values if values.is_pinned() else values.pin_memory()
        except RuntimeError as error:
            self._note_unpinned(error)
            return values

    def try_reserve(self, size_bytes: int) -> bool:
        now = time.monotonic()
        if size_bytes > self._room_bytes or now >= self._ask_again_s:
            self._room_bytes, self._ask_again_s = self._room(size_bytes), now + _ASK_EVERY_S
        has_room = size_bytes <= self._room_bytes
        self._room_bytes -= size_bytes if has_room else 0
        return has_room

    def _room(self, size_bytes: int) -> int:
        """Free bytes. The driver is only asked if torch holds fewer than `size_bytes`."""
        # `memory_reserved` and the like each flatten and sort a hundred figures.
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(self._index)
            reserved_bytes = stats["reserved_bytes"]["all"]["current"]
            peak_bytes = stats["allocated_bytes"]["all"]["peak"]
        except (RuntimeError, KeyError):  # an allocator of the user's may count nothing
            return 0
        # Ours, because the user's code may reset torch's.
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        spare_bytes: int = reserved_bytes - self._peak_bytes
        if spare_bytes >= size_bytes:
            return spare_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return int(spare_bytes + free_bytes)

    def _note_unpinned(self, error: RuntimeError) -> None:
        """Warn once. The system limits pinned memory; without it, copies block the thread that queues them."""
        if not self._said_unpinned:
            self._said_unpinned = True
            logger.warning("host memory cannot be pinned (%s): training waits for copies to and from the GPU", error)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Implements `Pending` with an event, recorded after the work."""

    event: torch.cuda.Event
    device_index: int
    held: tuple[torch.Tensor, ...]

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if not self.done:
            self.event.synchronize()
        # Nothing is left to wait for, but torch's sanitizer does not see what the host has waited for.
        torch.cuda.current_stream(self.device_index).wait_event(self.event)
