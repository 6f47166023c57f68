"""Received blocks mixed into live weights: θ += w · (received - θ), unless they are too far away.

With w = ½ two peers that exchange a block meet halfway, without a snapshot or a reply.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BLOCK_BYTES, BlockPlan, ParameterView, WeightView, check_rows

# Rows whose squares are added in float32. It must be `ROWS` of `kernels.c`, or the bits differ. A few arrays of so many
# rows stay in a second-level cache.
_ROWS = 1024

Rows = npt.NDArray[np.float32]


class Mixing:
    """Received blocks, compared with those of θ that they belong to. Implements `transfers.Comparison`.

    Args:
        view: of θ, which nothing else may change until `mix` was called.
        plan: names the blocks.
        received: (n, 64) float32 CPU, contiguous, only read.

    Attributes:
        own_rms: of the blocks of θ, over the parameters in the plan.
        rms: of received - θ, over the same.
    """

    def __init__(self, view: WeightView, plan: BlockPlan, received: torch.Tensor) -> None:
        check_rows(received, len(plan.blocks))
        self._view, self._plan, self._received = view, plan, _without_padding(plan, received)
        self._library = kernels.library()
        # The blocks of θ: where they lie, if the library can work on them there; else a copy.
        own = view.addresses(plan) if self._library is not None and isinstance(view, ParameterView) else None
        self._copy = view.gather(plan) if own is None else None
        if self._copy is not None:
            own = self._copy.data_ptr() + BLOCK_BYTES * np.arange(len(plan.blocks), dtype=np.intp)
        assert own is not None
        self._own = own
        squares = self._squares() / max(1, plan.numel)
        self.own_rms, self.rms = math.sqrt(squares[0]), math.sqrt(squares[1])

    def mix(self, weight: float | torch.Tensor, max_rms: float) -> float:
        """Mix: θ += weight · (received - θ). Call it once.

        Args:
            weight: one for all, or (n, 1) float32 CPU.
            max_rms: largest rms difference that is mixed.

        Returns:
            `rms`. Nothing was changed if it is above `max_rms` or not finite.
        """
        if not (math.isfinite(self.rms) and self.rms <= max_rms):
            return self.rms
        n = len(self._plan.blocks)
        each = weight if isinstance(weight, float) else weight.reshape(n).numpy()
        weights = np.ascontiguousarray(np.broadcast_to(each, n), np.float32)
        if self._library is not None:
            received, own = self._received.data_ptr(), kernels.address(self._own)
            self._library.mix(own, n, received, kernels.address(weights))
        else:
            assert self._copy is not None
            _mix(self._copy.numpy(), self._received.numpy(), weights[:, None])
        if self._copy is not None:
            self._view.scatter(self._plan, self._copy)
        return self.rms

    def _squares(self) -> npt.NDArray[np.float64]:
        """The sum of the squares of θ, and of those of received - θ."""
        n = len(self._plan.blocks)
        sums = np.zeros((2, BLOCK), np.float64)
        if self._library is not None:
            self._library.compare(kernels.address(self._own), n, self._received.data_ptr(), kernels.address(sums))
        else:
            assert self._copy is not None
            _compare(self._copy.numpy(), self._received.numpy(), sums)
        totals: npt.NDArray[np.float64] = sums.sum(axis=1)
        return totals


# The same as in `kernels.c`, which has the names without "_".


def _compare(own: Rows, received: Rows, sums: npt.NDArray[np.float64]) -> None:
    """Add the sums of each column, in float32 within `_ROWS` rows. What overflows is inf, and not mixed."""
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in _in_cache(own):
            sums[0] += np.add.reduce(np.square(own[rows]), axis=0)
            sums[1] += np.add.reduce(np.square(received[rows] - own[rows]), axis=0)


def _mix(own: Rows, received: Rows, weights: Rows) -> None:
    """From the nearer end: a weight of 1 gives `received` exactly."""
    for rows in _in_cache(own):
        weight, theirs, ours = weights[rows], received[rows], own[rows]
        is_near = weight < np.float32(0.5)
        change = theirs - ours
        change *= np.where(is_near, weight, weight - np.float32(1))
        np.add(ours if is_near.all() else np.where(is_near, ours, theirs), change, out=ours)


def mixed_on_device(own: torch.Tensor, received: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """The same with torch, on any device; overwrites `own`. Several weights are rare there, and take more calls."""
    if isinstance(weight, float):
        return own.lerp_(received, weight)
    is_near = weight < 0.5
    change = (received - own).mul_(torch.where(is_near, weight, weight - 1))
    return torch.where(is_near, own, received).add_(change)


def _in_cache(rows: Rows) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, len(rows), _ROWS)]


def _without_padding(plan: BlockPlan, received: torch.Tensor) -> torch.Tensor:
    """Received blocks with zeros in the padding, as θ has them; honest peers send them so."""
    tails = [(piece.rows.start, plan.numels[piece.tensor] % BLOCK) for piece in plan.pieces if piece.is_tail]
    if any(received[row, size:].any() for row, size in tails):
        received = received.clone()
        for row, size in tails:
            received[row, size:] = 0
    return received
