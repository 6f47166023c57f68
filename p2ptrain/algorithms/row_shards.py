"""Row shards: the blocks of the flat layout that a rank holds, if each parameter is split along its first dimension.

That is how FSDP2 splits (`Shard(0)`, rows as `torch.chunk` cuts them). A rank's part of a parameter is one range of
its values, which begins and ends anywhere, so a block of 64 may lie in several ranks. Each range is cut at its first
block border into at most two *segments*. The segments of a rank are tensors of an index space of its own. So a rank
reads and writes its blocks with a `ParameterView`, as a peer of one process does, and only the few blocks at the ends
of segments need more care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import IndexSpace

Numbers = npt.NDArray[np.int64]


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of a tensor that a rank holds, as `torch.chunk` cuts them: the last ranks may have fewer, or none."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


@dataclass(frozen=True)
class Held:
    """The parts of some blocks that one rank holds. All are (m,) int64, in the order of the blocks.

    Attributes:
        rows: which of the given blocks.
        numbers: the same in the rank's own index space.
        columns, widths: the first of the 64 values of the block that the rank holds, and how many.
    """

    rows: Numbers
    numbers: Numbers
    columns: Numbers
    widths: Numbers


class RowShard:
    """The part of the flat layout that one rank holds: some rows of each tensor.

    Attributes:
        ranges: for each tensor the values [start, stop) that the rank holds, of the flattened tensor.
        space: index space of the segments: two for each tensor, which may be empty.
    """

    def __init__(self, space: IndexSpace, rows: Sequence[int], rank: int, size: int) -> None:
        """
        Args:
            space: the flat layout of the whole tensors.
            rows: size of the first dimension of each tensor.
            rank, size: number of this rank, and number of ranks.
        """
        self.ranges = list[tuple[int, int]]()
        segments, first_blocks, columns = list[tuple[str, tuple[int, ...]]](), list[int](), list[int]()
        for tensor, (name, numel, length) in enumerate(zip(space.names, space.numels, rows, strict=True)):
            start, stop = (row * (numel // length) if length else 0 for row in row_range(length, rank, size))
            border = _border(start, stop)
            self.ranges.append((start, stop))
            segments += [(name, (border - start,)), (name, (stop - border,))]
            first_blocks += [int(space.tensor_starts[tensor]) + value // BLOCK for value in (start, border)]
            columns += [start % BLOCK, 0]
        self.space = IndexSpace(segments)
        # The segments that are not empty. In this order their blocks ascend.
        kept = np.flatnonzero(self.space.numels)
        self._first_blocks = np.array(first_blocks, np.int64)[kept]
        self._first_numbers = self.space.tensor_starts[:-1][kept]
        self._columns = np.array(columns, np.int64)[kept]
        self._numels = np.array(self.space.numels, np.int64)[kept]

    def segments(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of `space`: views of the contiguous tensors that the rank holds, in order."""
        views = []
        for tensor, (start, stop) in zip(tensors, self.ranges, strict=True):
            values = tensor.detach().view(-1)
            views += [values[: _border(start, stop) - start], values[_border(start, stop) - start :]]
        return views

    def held(self, blocks: Numbers) -> Held:
        """Find the parts of some blocks that the rank holds. `blocks`: (n,) int64, ascending, of the flat layout."""
        if not len(self._numels):
            none = np.zeros(0, np.int64)
            return Held(none, none, none, none)
        segment = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        within = (blocks - self._first_blocks[segment]) * BLOCK
        rows = np.flatnonzero((segment >= 0) & (within < self._numels[segment]))
        segment, within = segment[rows], within[rows]
        return Held(
            rows,
            self._first_numbers[segment] + within // BLOCK,
            self._columns[segment],
            np.minimum(self._numels[segment] - within, BLOCK),
        )


def put(held: Held, values: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a rank's parts, (m, 64) from its own view, to their places in `out`, (n, 64); the rest of it stays."""
    whole = np.flatnonzero(held.widths == BLOCK)
    out.numpy()[held.rows[whole]] = values.numpy()[whole]
    for part in np.flatnonzero(held.widths < BLOCK).tolist():
        row, column, width = (int(numbers[part]) for numbers in (held.rows, held.columns, held.widths))
        out[row, column : column + width] = values[part, :width]


def take(held: Held, values: torch.Tensor) -> torch.Tensor:
    """Return a rank's parts of `values`, (n, 64), as (m, 64) for its own view."""
    taken = torch.from_numpy(values.numpy()[held.rows])
    for part in np.flatnonzero(held.columns).tolist():
        column, width = int(held.columns[part]), int(held.widths[part])
        taken[part, :width] = values[held.rows[part], column : column + width]
    return taken


def _border(start: int, stop: int) -> int:
    """The first border of blocks in [start, stop], or stop."""
    return min(-(-start // BLOCK) * BLOCK, stop)
