"""Transfers between a model's weights and host memory. One may end later than the step that starts it.

An exchange starts a transfer in one `step()`, and finishes it in the first step that finds it done. Weights in this
process's memory need no waiting: with `AtOnce` every transfer is done when it is started, so starting and finishing
are one step. `DeviceTransfers` (`peer/device_transfers.py`) copies beside training instead of stopping the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BlockPlan, WeightView, mix_clipped, rms_of
from p2ptrain.algorithms.moments import MomentView

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transfer(Protocol[T_co]):
    """Something that was started. Whoever started it keeps it until it is done: it holds the memory in use."""

    @property
    def done(self) -> bool:
        """Whether `finish` returns without waiting. Never blocks."""

    def finish(self) -> T_co:
        """Wait until it is done, complete it, and return its result. Call it once, from the training thread."""


class Comparison(Protocol):
    """A received fragment and the blocks of θ that it belongs to. `own_rms`: of these blocks."""

    @property
    def own_rms(self) -> float: ...
    def mix(self, weight: float | torch.Tensor, max_rms: float) -> float:
        """As `mix_clipped`: mix with θ as it is now. Returns rms(received - θ), with θ as it was when `compare` was
        called; nothing has changed if that is above `max_rms` or not finite."""


class Transfers(Protocol):
    """What an exchange does with weights. All methods but `buffer` and `pin` are for the training thread.

    Attributes:
        pins: Whether host memory should be pinned.
    """

    @property
    def pins(self) -> bool: ...
    def gather(self, plan: BlockPlan) -> Transfer[torch.Tensor]:
        """Copy the plan's blocks as they are now; (n, 64) float32 in host memory, owned by the caller."""

    def compare(self, plan: BlockPlan, received: torch.Tensor) -> Transfer[Comparison]:
        """Compare the plan's blocks with received ones, (n, 64) float32 in host memory, only read."""

    def read(self, out: torch.Tensor) -> Transfer[None]:
        """Copy all weights as they are now into `out`, (num_blocks, 64) float32 in host memory, zero in the padding."""

    def land(self, flat: torch.Tensor, *, adds: bool) -> Transfer[None]:
        """Add `flat`, (num_blocks, 64) float32 in host memory, to θ, or set θ to it: in `finish`, and not before.

        `flat` is only read. It may be changed or released once `finish` has returned.
        """

    def buffer(self) -> torch.Tensor:
        """A new (num_blocks, 64) float32 buffer in host memory, with its pages allocated. Any thread may call it."""

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, or a copy, in memory that the device can copy from on its own. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A transfer that has nothing to wait for."""

    finish: Callable[[], T]
    done: ClassVar[bool] = True


class AtOnce:
    """The transfers of weights in this process's memory, and of those that can only be read and written at once."""

    pins: ClassVar[bool] = False

    def __init__(self, view: WeightView, averaged: MomentView | None = None) -> None:
        """`averaged`: what `read`, `land` and `buffer` are of; None: of `view`, as the other methods."""
        self._view = view
        self._averaged: WeightView | MomentView = averaged or view

    def gather(self, plan: BlockPlan) -> Done[torch.Tensor]:
        values = self._view.gather(plan)
        return Done(lambda: values)

    def compare(self, plan: BlockPlan, received: torch.Tensor) -> Done[Comparison]:
        return Done(lambda: _Gathered(self._view, plan, received))

    def read(self, out: torch.Tensor) -> Done[None]:
        self._averaged.read(out)
        return Done(lambda: None)

    def land(self, flat: torch.Tensor, *, adds: bool) -> Done[None]:
        return Done(lambda: (self._averaged.add if adds else self._averaged.write)(flat))

    def buffer(self) -> torch.Tensor:
        return torch.empty((self._averaged.space.num_blocks, BLOCK)).fill_(0.0)

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        return values


class _Gathered:
    """Implements `Comparison`. Mixes the blocks that it has gathered, so mix at once."""

    def __init__(self, view: WeightView, plan: BlockPlan, received: torch.Tensor) -> None:
        self._view, self._plan, self._received = view, plan, received
        self._own = view.gather(plan)
        self.own_rms = rms_of(self._own, plan)

    def mix(self, weight: float | torch.Tensor, max_rms: float) -> float:
        return mix_clipped(self._view, self._plan, self._received, weight, max_rms, self._own)
