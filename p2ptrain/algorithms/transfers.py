"""Transfers between a model's weights and host memory. One may end later than the step that starts it.

An exchange starts a transfer in one `step()`, and finishes it in the first step that finds it done, or in pieces over
that step and later ones. Weights in this process's memory need no waiting, but copying a whole large model takes the
training thread long, so it is done in pieces (`Pieces`). Transfers `AtOnce` start and finish in one step. On a GPU,
copies go beside training instead of stopping the device (`peer/device_transfers.py`).

There are two kinds: of fragments, which are some blocks of the parameters, and of all that rounds average, as a vector
in the flat layout (`indexspace.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import (
    BlockPlan,
    FlatView,
    ParameterView,
    WeightChange,
    WeightView,
    apply_changes,
)
from p2ptrain.algorithms.mixing import Mixing

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transfer(Protocol[T_co]):
    """A transfer that was started. Keep it until it is done, because it holds the memory in use."""

    @property
    def done(self) -> bool:
        """Whether `finish` returns without waiting. Never blocks."""

    def advance(self) -> bool:
        """Do one small piece of the work of `finish`. Returns whether pieces remain.

        Call it once it is done, from the training thread. False if no pieces remain, or the work cannot be divided. If
        a piece raises, it remains.
        """

    def finish(self) -> T_co:
        """Wait until it is done, complete it, and return its result. Call it once, from the training thread."""


def has_ended(transfer: Transfer[Any]) -> bool:
    """Whether `finish` returns, or raises, without waiting: a device that fails does so also when it is asked."""
    try:
        return transfer.done
    except Exception:
        return True


class Comparison(Protocol):
    """A received fragment and the blocks of θ that it belongs to. `own_rms`: of these blocks."""

    @property
    def own_rms(self) -> float: ...
    def mix(self, weight: float | torch.Tensor, max_rms: float) -> float:
        """As `Mixing.mix`, with θ as it is now. Returns rms(received - θ), with θ as it was when `compare` was
        called; nothing has changed if that is above `max_rms` or not finite."""


class FragmentTransfers(Protocol):
    """Transfers of blocks of the parameters. For the training thread, except `pin`."""

    def gather(self, plan: BlockPlan) -> Transfer[torch.Tensor]:
        """Copy the plan's blocks as they are now; (n, 64) float32 in host memory, owned by the caller."""

    def compare(self, plan: BlockPlan, received: torch.Tensor) -> Transfer[Comparison]:
        """Compare the plan's blocks with received ones, (n, 64) float32 in host memory, only read."""

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, or a copy, in memory that the device can copy from on its own. Any thread may call it."""


class FlatTransfers(Protocol):
    """Transfers of all that rounds average. For the training thread, except `buffer`.

    Attributes:
        pins: Whether host memory should be pinned.
    """

    @property
    def pins(self) -> bool: ...
    def read(self, out: torch.Tensor) -> Transfer[None]:
        """Copy everything into `out`, (num_blocks, 64) float32 in host memory, zero in the padding.

        As it is now, except that each piece of a transfer in pieces is as it is when that is made.
        """

    def land(self, flat: torch.Tensor, *, adds: bool) -> Transfer[None]:
        """Add `flat`, (num_blocks, 64) float32 in host memory, to θ, or set θ to it: in `advance` and `finish`.

        `flat` is only read. It may be changed or released once `finish` has returned. If one of them raises, a part of
        θ may have changed; called again, they change the rest, so that each value changes once.
        """

    def buffer(self) -> torch.Tensor:
        """A new (num_blocks, 64) float32 buffer in host memory, with its pages allocated. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """All transfers of a model's parameters. `section`: those of some tensors, in the flat layout of these alone."""

    fragments: FragmentTransfers
    flat: FlatTransfers
    section: Callable[[slice], FlatTransfers]


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A transfer that has nothing to wait for."""

    finish: Callable[[], T]
    done: ClassVar[bool] = True

    def advance(self) -> bool:
        return False


class Pieces:
    """A transfer that the training thread makes itself, in these pieces. It can be dropped at any time."""

    done: ClassVar[bool] = True

    def __init__(self, pieces: Sequence[WeightChange]) -> None:
        self._pieces = deque(pieces)

    def advance(self) -> bool:
        if self._pieces:
            self._pieces[0]()
            self._pieces.popleft()
        return bool(self._pieces)

    def finish(self) -> None:
        apply_changes(self._pieces)


def at_once(view: WeightView) -> Transfers:
    """The transfers of weights that are read and written at once, whatever time that takes."""
    return Transfers(FragmentsAtOnce(view), FlatAtOnce(view), lambda tensors: FlatAtOnce(view.section(tensors)))


def in_pieces(view: ParameterView) -> Transfers:
    """The transfers of weights in this process's memory."""
    return Transfers(FragmentsAtOnce(view), FlatInPieces(view), lambda tensors: FlatInPieces(view.section(tensors)))


class FragmentsAtOnce:
    """Implements `FragmentTransfers`."""

    def __init__(self, view: WeightView) -> None:
        self._view = view

    def gather(self, plan: BlockPlan) -> Done[torch.Tensor]:
        values = self._view.gather(plan)
        return Done(lambda: values)

    def compare(self, plan: BlockPlan, received: torch.Tensor) -> Done[Comparison]:
        return Done(lambda: Mixing(self._view, plan, received))

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        return values


class FlatAtOnce:
    """Implements `FlatTransfers`."""

    pins: ClassVar[bool] = False

    def __init__(self, view: FlatView) -> None:
        self._view = view

    def read(self, out: torch.Tensor) -> Done[None]:
        self._view.read(out)
        return Done(lambda: None)

    def land(self, flat: torch.Tensor, *, adds: bool) -> Done[None]:
        changes = deque(self._view.changes(flat, adds=adds))
        return Done(lambda: apply_changes(changes))

    def buffer(self) -> torch.Tensor:
        return _new_buffer(self._view)


class FlatInPieces:
    """Implements `FlatTransfers`."""

    pins: ClassVar[bool] = False

    def __init__(self, view: ParameterView) -> None:
        self._view = view

    def read(self, out: torch.Tensor) -> Pieces:
        return Pieces(self._view.copies(out))

    def land(self, flat: torch.Tensor, *, adds: bool) -> Pieces:
        return Pieces(self._view.changes(flat, adds=adds))

    def buffer(self) -> torch.Tensor:
        return _new_buffer(self._view)


def _new_buffer(view: FlatView) -> torch.Tensor:
    return torch.empty((view.space.num_blocks, BLOCK), dtype=torch.float32, device="cpu").fill_(0.0)
