"""The transfers of a model's weights on a GPU: copies on a side stream, while the device trains on.

Weights that must belong to one step are first copied on the device, by a kernel on the training stream, which runs
after the optimizer's last kernels and before the next ones. Nobody waits for it. The copy then goes to host memory on
the side stream. Values from the host go into separate memory on the device, and a later kernel on the training stream
changes the weights with them. So weights are read and written only on the training stream, in the order of the calls.

A snapshot takes 4 bytes a parameter on the device until it is in host memory, and so does a landing until it is
applied; a fragment 12 bytes for each of its values. If that much is not free (`SideStream.try_reserve`), it goes as on
other devices (`at_once`), and training waits for it.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BlockPlan, ParameterView, PlacedPlan, apply_changes
from p2ptrain.algorithms.mixing import mixed_on_device
from p2ptrain.algorithms.transfers import Comparison, FlatAtOnce, FragmentsAtOnce, Transfer, Transfers
from p2ptrain.peer.side_stream import Pending, SideStream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Queued(Generic[T]):
    """A transfer whose work is queued. `complete` makes its result when the work is done."""

    pending: Pending
    complete: Callable[[], T]

    @property
    def done(self) -> bool:
        return self.pending.done

    def advance(self) -> bool:
        return False

    def finish(self) -> T:
        self.pending.wait()
        return self.complete()


def device_transfers(view: ParameterView, side: SideStream) -> Transfers:
    """The transfers of parameters that are all on the stream's device."""
    return Transfers(
        DeviceFragments(view, side), DeviceFlat(view, side), lambda tensors: DeviceFlat(view.section(tensors), side)
    )


class DeviceFragments:
    """Implements `FragmentTransfers`."""

    def __init__(self, view: ParameterView, side: SideStream) -> None:
        self._view = view
        self._side = side
        self._at_once = FragmentsAtOnce(view)

    def gather(self, plan: BlockPlan) -> Transfer[torch.Tensor]:
        if not self._side.try_reserve(4 * BLOCK * len(plan.blocks)):
            return self._at_once.gather(plan)
        gathered = self._view.gather_on_device(self._placed(plan))
        values = self._side.host(*gathered.shape)
        pending = self._side.run(lambda: values.copy_(gathered, non_blocking=True), reads=[gathered], writes=[values])
        return _Queued(pending, lambda: values)

    def compare(self, plan: BlockPlan, received: torch.Tensor) -> Transfer[Comparison]:
        if not self._side.try_reserve(3 * received.nbytes):
            return self._at_once.compare(plan, received)
        placed, source = self._placed(plan), self._side.pin(received)
        # Few calls: each costs this thread more than the device.
        both = torch.empty(2, *received.shape, dtype=torch.float32, device=self._side.device)
        own, difference = both.unbind()
        self._view.gather_on_device(placed, own)
        theirs = torch.empty_like(own)
        norms = self._side.host(2)

        def work() -> None:
            theirs.copy_(source, non_blocking=True)
            torch.sub(theirs, own, out=difference)
            for piece in plan.pieces if plan.has_tails else ():
                if piece.is_tail:
                    difference[piece.rows.start, self._view.space.numels[piece.tensor] % BLOCK :].zero_()
            norms.copy_(torch.linalg.vector_norm(both, dim=(1, 2)), non_blocking=True)

        def complete() -> _Compared:
            own_rms, rms = (norm / math.sqrt(max(1, plan.numel)) for norm in norms.tolist())
            return _Compared(self._view, self._side, placed, theirs, own_rms, rms)

        return _Queued(self._side.run(work, reads=[source, own], writes=[difference, theirs, norms]), complete)

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        return self._side.pin(values)

    def _placed(self, plan: BlockPlan) -> PlacedPlan:
        """The plan with its index on the device; 8 bytes a block, copied on the training stream."""
        return self._view.place(plan, upload=functools.partial(_uploaded, self._side))


class DeviceFlat:
    """Implements `FlatTransfers`."""

    pins: ClassVar[bool] = True

    def __init__(self, view: ParameterView, side: SideStream) -> None:
        self._view = view
        self._side = side
        self._at_once = FlatAtOnce(view)

    def read(self, out: torch.Tensor) -> Transfer[None]:
        staged = self._staging()
        if staged is None:
            return self._at_once.read(out)
        self._view.read(staged)
        pending = self._side.run(lambda: out.copy_(staged, non_blocking=True), reads=[staged], writes=[out])
        return _Queued(pending, lambda: None)

    def land(self, flat: torch.Tensor, *, adds: bool) -> Transfer[None]:
        staged = self._staging()
        if staged is None:
            return self._at_once.land(flat, adds=adds)
        pending = self._side.run(lambda: staged.copy_(flat, non_blocking=True), reads=[flat], writes=[staged])
        changes = deque(self._view.changes(staged, adds=adds))
        return _Queued(pending, lambda: apply_changes(changes))

    def buffer(self) -> torch.Tensor:
        return self._side.host(self._view.space.num_blocks, BLOCK)

    def _staging(self) -> torch.Tensor | None:
        """Memory on the device for all weights as float32; None if there is too little."""
        shape = (self._view.space.num_blocks, BLOCK)
        if not self._side.try_reserve(4 * math.prod(shape)):
            return None
        try:
            return torch.empty(shape, dtype=torch.float32, device=self._side.device)
        except torch.cuda.OutOfMemoryError:  # what is free is in pieces
            return None


@dataclass(frozen=True, slots=True)
class _Compared:
    """Implements `Comparison`: a received fragment on the device, and its distance from θ when it was compared."""

    view: ParameterView
    side: SideStream
    placed: PlacedPlan
    theirs: torch.Tensor
    own_rms: float
    rms: float

    @torch.no_grad()
    def mix(self, weight: float | torch.Tensor, max_rms: float) -> float:
        if math.isfinite(self.rms) and self.rms <= max_rms:
            own = self.view.gather_on_device(self.placed)
            weight = weight if isinstance(weight, float) else _uploaded(self.side, weight)
            self.view.scatter_on_device(self.placed, mixed_on_device(own, self.theirs, weight))
        return self.rms


def _uploaded(side: SideStream, values: torch.Tensor) -> torch.Tensor:
    """Copy a few values to the device, on the training stream."""
    return side.pin(values).to(side.device, non_blocking=True)
