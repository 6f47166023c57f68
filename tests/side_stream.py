"""A stand-in for a GPU's side stream: the "device" is this machine's memory, and what is queued happens later."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch


class Mistake(BaseException):
    """A use of memory that would corrupt values on a GPU. No `Exception`, so that no code contains it."""


class LateStream:
    """Implements `SideStream`. Queued work is done, in order, when it was polled often enough.

    What the caller does itself, the training stream, happens at once. So it is as far ahead of the side stream as it
    can be. Mistakes that would corrupt values on a GPU are found:

    - What queued work will write is NaN until it is done, so that a reader that does not wait gets NaN.
    - Work whose sources were changed while it was queued raises Mistake.
    - So does work that was dropped while it was queued: its memory would have been used again.

    Args:
        polls: how often the next work must be polled in vain before it is done.

    Attributes:
        room: what `try_reserve` answers.
        waited: how often somebody blocked.
    """

    def __init__(self, polls: Callable[[], int] = lambda: 0) -> None:
        self.device = torch.device("cpu")
        self.room = True
        self.waited = 0
        self._polls = polls
        self._queue: deque[weakref.ref[_Queued]] = deque()

    def run(
        self, work: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> _Queued:
        for tensor in writes:
            tensor.fill_(torch.nan)
        queued = _Queued(self, work, [(tensor, bits(tensor).clone()) for tensor in reads], self._polls())
        self._queue.append(weakref.ref(queued))
        return queued

    def host(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan)

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def try_reserve(self, size_bytes: int) -> bool:
        return self.room

    @property
    def queued(self) -> int:
        """How much of the work is not done."""
        return len(self._queue)

    def do_until(self, queued: _Queued) -> None:
        while not queued.is_done:
            first = self._queue.popleft()()
            if first is None:
                raise Mistake("work was dropped while it was queued: its memory would have been used again")
            for tensor, before in first.reads:
                if not torch.equal(bits(tensor), before):
                    raise Mistake("a source was changed while the work was queued")
            first.work()
            first.is_done = True


class _Queued:
    """Implements `Pending`."""

    def __init__(
        self, stream: LateStream, work: Callable[[], object], reads: list[tuple[torch.Tensor, torch.Tensor]], polls: int
    ) -> None:
        self.work, self.reads, self.is_done = work, reads, False
        self._stream, self._polls_left = stream, polls

    @property
    def done(self) -> bool:
        if not self.is_done and self._polls_left > 0:
            self._polls_left -= 1
        elif not self.is_done:
            self._stream.do_until(self)
        return self.is_done

    def wait(self) -> None:
        self._stream.waited += not self.is_done
        self._stream.do_until(self)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
