"""All trainable parameters as one flat space of 64-value blocks, read and written in place.

The *flat layout*: every trainable tensor in order, each padded with zeros to a multiple of 64, so that a flat vector
is `(num_blocks, 64)` float32 and every block belongs to exactly one tensor. Fragments and rounds consist of blocks:
drawing 64 contiguous values at a time has no measurable cost in loss, and is 60 times cheaper than drawing single
values. Padding is always zero and is never written to a parameter.

The training thread does little of the work: `IndexSpace.plan` assigns block numbers to tensors on any thread, and the
methods of `ParameterView` then touch only the chosen blocks of the live parameters. The parameters keep their storage,
so optimizers, autocast and compiled graphs that exist already keep working.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.joined_tensors import JoinedTensors

# Values of one piece, where copying or changing goes in pieces: 2 MiB, well below a millisecond.
_PIECE_VALUES = 2**19

BLOCK_BYTES = 4 * BLOCK

Items = npt.NDArray[np.void]
WeightChange = Callable[[], object]
# Changes some tensors. The second list has as many values of a flat vector for each.
_Change = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
_Place = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Piece(NamedTuple):
    """Consecutive rows of a plan that lie in one tensor: some of its full blocks, or its short last block alone."""

    tensor: int
    is_tail: bool
    rows: slice


@dataclass(frozen=True)
class BlockPlan:
    """The places of a fragment's blocks. `IndexSpace.plan` makes it; it is immutable, so threads may share it.

    Attributes:
        blocks: (n,) int64, sorted block numbers of the flat layout, each at most once.
        numel: how many of the n · 64 values are parameters; the rest is padding.
        pieces: the rows, in order, by tensor.
        tensors: (n,) int64, the number of each block's tensor.
        index: (n,) int64 tensor, the number of each block within its tensor.
        numels: of the space that it was made for.
    """

    blocks: npt.NDArray[np.int64]
    numel: int
    pieces: tuple[Piece, ...]
    tensors: npt.NDArray[np.int64]
    index: torch.Tensor
    numels: list[int]

    @property
    def has_tails(self) -> bool:
        """Whether a block is the short last one of its tensor."""
        return self.numel < BLOCK * len(self.blocks)


@dataclass(frozen=True)
class PlacedPlan:
    """A plan, and the places of its blocks in the memory of one view's parameters. `ParameterView.place` makes it.

    Attributes:
        index: (n,) int64 on the device of the first parameter. Of a full block of a joined tensor, its row of
            the joined tensors; of any other, its number within its tensor.
        all_joined: whether all blocks are in joined tensors, so that one call copies them.
        together: else, the rows of the plan that are; one call copies each slice.
        apart: the short last blocks, and the full blocks of tensors that are neither joined nor plain.
    """

    plan: BlockPlan
    index: torch.Tensor
    all_joined: bool
    together: Sequence[slice]
    apart: Sequence[Piece]


class IndexSpace:
    """The flat layout of a list of tensors, computed from their shapes.

    Attributes:
        names, numels: name and number of values of each tensor, in order.
        tensor_starts: (tensors + 1,) int64, the first block of each tensor, then num_blocks.
        num_blocks: total number of blocks.
        numel: number of parameters, without padding.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.names = [name for name, _ in shapes]
        self.numels = [math.prod(shape) for _, shape in shapes]
        self.tensor_starts = np.zeros(len(shapes) + 1, np.int64)
        np.cumsum([-(-numel // BLOCK) for numel in self.numels], out=self.tensor_starts[1:])
        self.num_blocks = int(self.tensor_starts[-1])
        self.numel = sum(self.numels)

    def sections(self, count: int) -> list[slice]:
        """Cut the tensors into so many sections, in order, of about as many blocks each.

        If fewer tensors have values, there is a section for each of them.
        """
        starts, firsts = np.unique(self.tensor_starts, return_index=True)
        most = len(starts) - 1
        count, cuts = min(count, most), [0]
        for left in range(count, 1, -1):
            # What is left in equal shares: an embedding may be larger than one.
            done = int(starts[cuts[-1]])
            nearest = int(np.abs(starts - done - (self.num_blocks - done) / left).argmin())
            cuts.append(min(max(nearest, cuts[-1] + 1), most - left + 1))
        return [slice(*cut) for cut in itertools.pairwise([*firsts[cuts].tolist(), len(self.numels)])]

    def section(self, tensors: slice) -> IndexSpace:
        """The flat layout of consecutive tensors alone."""
        return IndexSpace([(n, (numel,)) for n, numel in zip(self.names[tensors], self.numels[tensors], strict=True)])

    def plan(self, blocks: npt.ArrayLike) -> BlockPlan:
        """Find the tensor of each block. Any thread may call it.

        Args:
            blocks: (n,) distinct integers in any order, each in [0, num_blocks).

        Raises:
            ValueError: a block is out of range or given twice.
        """
        ordered = np.sort(np.asarray(blocks, np.int64))
        if ordered.size and not 0 <= ordered[0] <= ordered[-1] < self.num_blocks:
            raise ValueError(f"blocks {ordered[0]} to {ordered[-1]} are not all in [0, {self.num_blocks})")
        if np.any(ordered[1:] == ordered[:-1]):
            raise ValueError("a block is given twice; a plan holds each block at most once")
        pieces, padding = [], 0
        row_starts = np.searchsorted(ordered, self.tensor_starts)
        for tensor in np.flatnonzero(np.diff(row_starts)).tolist():
            start, stop = int(row_starts[tensor]), int(row_starts[tensor + 1])
            tail = self.numels[tensor] % BLOCK
            full_stop = stop - int(tail > 0 and ordered[stop - 1] == self.tensor_starts[tensor + 1] - 1)
            if full_stop > start:
                pieces.append(Piece(tensor, is_tail=False, rows=slice(start, full_stop)))
            if full_stop < stop:
                pieces.append(Piece(tensor, is_tail=True, rows=slice(full_stop, stop)))
                padding += BLOCK - tail
        tensors = np.repeat(np.arange(len(self.numels)), np.diff(row_starts))
        index = torch.from_numpy(ordered - self.tensor_starts[tensors])
        return BlockPlan(ordered, ordered.size * BLOCK - padding, tuple(pieces), tensors, index, self.numels)


class FlatView(Protocol):
    """A whole flat vector that an exchange reads and writes. `ParameterView` describes the methods."""

    @property
    def space(self) -> IndexSpace: ...
    def read(self, out: torch.Tensor) -> None: ...
    def changes(self, flat: torch.Tensor, *, adds: bool) -> Sequence[WeightChange]: ...


class WeightView(FlatView, Protocol):
    """A `FlatView` whose blocks can also be read and written: of parameters in this process, or in a process group."""

    def gather(self, plan: BlockPlan) -> torch.Tensor: ...
    def scatter(self, plan: BlockPlan, values: torch.Tensor) -> None: ...
    def section(self, tensors: slice) -> FlatView: ...


class ParameterView:
    """Reads and writes live parameters in the flat layout. Call it only from the training thread.

    The caller owns the tensors. The methods that write change them in place, round to their dtype, and never replace
    their storage. Contiguous tensors (any float dtype, any device) are used directly; others go through a copy.
    """

    def __init__(self, space: IndexSpace, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if the sizes of the tensors are not those of `space`."""
        if [tensor.numel() for tensor in tensors] != space.numels:
            raise ValueError("the tensors' sizes differ from those of the index space")
        self.space = space
        self.tensors = list(tensors)
        self._device = self.tensors[0].device if self.tensors else torch.device("cpu")
        in_memory = self._device.type == "cpu"
        # Full blocks of the plain tensors, by number of the tensor. While numpy has them, torch does not resize them.
        self._items = {n: _items(tensor) for n, tensor in enumerate(self.tensors) if in_memory and _is_plain(tensor)}
        # Of the same tensors: the address that block 0 of the flat layout would have.
        starts = {n: self.tensors[n].data_ptr() - int(space.tensor_starts[n]) * BLOCK_BYTES for n in self._items}
        self._origins = np.array([starts.get(n, 0) for n in range(len(self.tensors))], np.intp)
        self._joined = JoinedTensors.of(self._device, self.tensors)
        first_rows = self._joined.first_rows
        self._is_joined = np.array([n in first_rows for n in range(len(self.tensors))], np.bool_)
        # Added to the number of a block, its row of the joined tensors; of others, its number within its tensor.
        self._row_offsets = np.array([first_rows.get(n, 0) for n in range(len(self.tensors))], np.int64)
        self._row_offsets -= space.tensor_starts[:-1]

    def __reduce__(self) -> tuple[type[ParameterView], tuple[IndexSpace, list[torch.Tensor]]]:
        """A copy reads and writes copies of the tensors, at other addresses."""
        return ParameterView, (self.space, self.tensors)

    def section(self, tensors: slice) -> ParameterView:
        """The view of some of the tensors, whose flat layout begins with the first of them."""
        return ParameterView(self.space.section(tensors), self.tensors[tensors])

    def place(self, plan: BlockPlan, upload: Callable[[torch.Tensor], torch.Tensor] | None = None) -> PlacedPlan:
        """Find where a plan's blocks lie.

        Args:
            upload: copies the index to the parameters' device without waiting; None: it is copied as usual.

        Raises:
            ValueError: the plan was made for another space.
        """
        self._check(plan)
        index, together, rest = plan.index, list[slice](), list(plan.pieces)
        if self._joined.first_rows:
            index = torch.from_numpy(self._row_offsets[plan.tensors] + plan.blocks)
        all_joined = len(self._joined.first_rows) == len(self.tensors) and not plan.has_tails
        if all_joined:
            rest = []  # the usual case on a GPU: skip the search for runs
        elif self._joined.first_rows:
            is_joined = self._is_joined[plan.tensors]
            is_joined[[piece.rows.start for piece in plan.pieces if piece.is_tail]] = False
            # Where the runs of True start and stop.
            edges = np.flatnonzero(np.diff(is_joined, prepend=False, append=False))
            together = [slice(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
            rest = [] if is_joined.all() else [piece for piece in rest if not is_joined[piece.rows.start]]
        apart = [piece for piece in rest if piece.is_tail or piece.tensor not in self._items]
        index = upload(index) if upload else index.to(self._device)
        return PlacedPlan(plan, index, all_joined, together, apart)

    def gather(self, plan: BlockPlan) -> torch.Tensor:
        """Copy the plan's blocks. Returns a new (n, 64) float32 CPU tensor with zeros in the padding."""
        return self.gather_on_device(self.place(plan)).cpu()

    @torch.no_grad()
    def gather_on_device(self, placed: PlacedPlan, out: torch.Tensor | None = None) -> torch.Tensor:
        """Like `gather`, on the device of the first parameter. If all are there, the host waits for nothing.

        Args:
            out: contiguous (n, 64) float32 on that device; None allocates it.
        """
        if placed.all_joined:
            return _take(self._joined.rows, placed.index, out)
        gathered = out
        if gathered is None:
            gathered = torch.empty(len(placed.index), BLOCK, dtype=torch.float32, device=self._device)
        if self._items and (library := kernels.library()) is not None:
            addresses = self._addresses(placed.plan, placed.apart)
            library.gather(kernels.address(addresses), len(addresses), gathered.data_ptr())
        else:
            for items, rows_out, numbers in self._plain_pieces(placed.plan, gathered):
                # With mode="raise" numpy would copy once more; the plan's numbers are in range.
                items.take(numbers, out=rows_out, mode="clip")
        for rows in placed.together:
            _take(self._joined.rows, placed.index[rows], gathered[rows])
        for piece in placed.apart:
            tensor, taken = self.tensors[piece.tensor].contiguous(), gathered[piece.rows]
            if piece.is_tail:
                tail = _tail(tensor)
                taken.zero_()[0, : len(tail)] = tail
            else:
                _take(_full_blocks(tensor), placed.index[piece.rows].to(tensor.device), taken)
        return gathered

    def scatter(self, plan: BlockPlan, values: torch.Tensor) -> None:
        """Set the plan's blocks to `values`, (n, 64) float32, only read: θ = values there."""
        self.scatter_on_device(self.place(plan), values.to(self._device))

    @torch.no_grad()
    def scatter_on_device(self, placed: PlacedPlan, values: torch.Tensor) -> None:
        """Like `scatter`, of `values` on the device of the first parameter. The host waits as in `gather_on_device`."""
        values = values.contiguous()
        if placed.all_joined:
            self._joined.rows.index_copy_(0, placed.index, values.to(self._joined.rows.dtype))
            return
        if self._items:
            check_rows(values, len(placed.plan.blocks))
        if self._items and (library := kernels.library()) is not None:
            addresses = self._addresses(placed.plan, placed.apart)
            library.scatter(kernels.address(addresses), len(addresses), values.data_ptr())
        else:
            for items, new, numbers in self._plain_pieces(placed.plan, values):
                items[numbers] = new
        for rows in placed.together:
            self._joined.rows.index_copy_(0, placed.index[rows], values[rows].to(self._joined.rows.dtype))
        for piece in placed.apart:
            tensor, new_rows = self.tensors[piece.tensor], values[piece.rows]
            target = tensor.contiguous()
            if piece.is_tail:
                tail = _tail(target)
                tail.copy_(new_rows[0, : len(tail)])
            else:
                _full_blocks(target).index_copy_(0, placed.index[piece.rows].to(target.device), new_rows.to(target))
            if target is not tensor:
                tensor.copy_(target)

    def read(self, out: torch.Tensor) -> None:
        """Copy all parameters into `out`, (num_blocks, 64) float32 CPU; its padding becomes zero."""
        apply_changes(deque(self.copies(out)))

    def copies(self, out: torch.Tensor) -> Sequence[WeightChange]:
        """The work of `read`, cut into pieces as in `changes`."""
        places = list(self.places(out))
        return [*(padding.zero_ for _, _, padding in places if len(padding)), *_in_pieces(_read, places)]

    def changes(self, flat: torch.Tensor, *, adds: bool) -> Sequence[WeightChange]:
        """The changes that set all parameters to `flat`, (num_blocks, 64) float32, which is only read: θ = flat.

        If `adds`, they add it instead, in float32 or better: θ += flat.

        There is one change for each tensor, or for each small part of one in host memory. If `flat` is on the tensors'
        device, there is one for all of them that have the same dtype.
        A change of one tensor that raises has changed nothing.
        """
        return _in_pieces(_add if adds else _write, self.places(flat))

    def addresses(self, plan: BlockPlan) -> npt.NDArray[np.intp] | None:
        """Where the plan's blocks lie in this process's memory: (n,); None unless all are 64 float32 values in a row.

        The caller may read and write them there, as long as it keeps this view.
        """
        self._check(plan)
        if any(piece.is_tail or piece.tensor not in self._items for piece in plan.pieces):
            return None
        return self._addresses(plan, ())

    def _check(self, plan: BlockPlan) -> None:
        if plan.numels != self.space.numels:
            raise ValueError("the plan was made for another index space")

    def _addresses(self, plan: BlockPlan, apart: Sequence[Piece]) -> npt.NDArray[np.intp]:
        """Where the plan's blocks lie; 0 for those that are `apart` or not of a plain tensor."""
        origins = self._origins[plan.tensors]
        addresses = np.where(origins == 0, 0, origins + plan.blocks * BLOCK_BYTES)
        for piece in apart:
            addresses[piece.rows] = 0
        return addresses

    def _plain_pieces(
        self, plan: BlockPlan, rows: torch.Tensor
    ) -> Iterator[tuple[Items, Items, npt.NDArray[np.int64]]]:
        """Yield, for each piece of full blocks of a plain tensor, these blocks, its part of `rows`, and its numbers."""
        if self._items:
            all_rows, index = _items(rows), plan.index.numpy()
            for piece in plan.pieces:
                if piece.tensor in self._items and not piece.is_tail:
                    yield self._items[piece.tensor], all_rows[piece.rows], index[piece.rows]

    def places(self, flat: torch.Tensor) -> Iterator[_Place]:
        """Yield each tensor with its part of `flat`, a view of the same shape, and the padding that follows."""
        line = flat.view(-1)
        starts = (self.space.tensor_starts * BLOCK).tolist()
        for tensor, start, stop in zip(self.tensors, starts, starts[1:], strict=False):
            end = start + tensor.numel()
            yield tensor, line[start:end].view(tensor.shape), line[end:stop]


def check_rows(rows: torch.Tensor, n: int) -> None:
    """Raises ValueError unless these are `n` rows of 64 float32 values, in memory as the library reads them."""
    is_as_it_lies = rows.device.type == "cpu" and rows.is_contiguous() and not rows.is_neg()
    if (rows.dtype, tuple(rows.shape), is_as_it_lies) != (torch.float32, (n, BLOCK), True):
        raise ValueError(
            f"{tuple(rows.shape)} {rows.dtype} on {rows.device}: must be ({n}, {BLOCK}) float32, contiguous"
        )


def apply_changes(changes: deque[WeightChange]) -> None:
    """Make the changes in order. Each is removed once it is made, so that after an error the rest can be made."""
    while changes:
        changes[0]()
        changes.popleft()


def _in_pieces(change: _Change, places: Iterable[_Place]) -> list[WeightChange]:
    """A change for each tensor and its values. Of a large tensor in host memory, one for each small part.

    On a device each call costs, so there is one for all tensors of one dtype whose values are there too; torch makes it
    of few kernels if they are contiguous.
    """
    changes: list[WeightChange] = []
    kinds: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor, values, _ in places:
        if tensor.device.type != "cpu" and tensor.device == values.device:
            kind = kinds.setdefault((tensor.device, tensor.dtype, tensor.is_contiguous()), ([], []))
            kind[0].append(tensor)
            kind[1].append(values)
        elif tensor.numel() > _PIECE_VALUES and tensor.device.type == "cpu" and tensor.is_contiguous():
            starts = range(0, tensor.numel(), _PIECE_VALUES)
            changes += [functools.partial(_change_piece, change, tensor, values, start) for start in starts]
        else:
            changes.append(functools.partial(change, [tensor], [values]))
    return [*changes, *(functools.partial(change, *kind) for kind in kinds.values())]


def _change_piece(change: _Change, tensor: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """Make a change to the values from `start` on, of contiguous tensors. Views cost too much to make them before."""
    piece = slice(start, start + _PIECE_VALUES)
    change([tensor.detach().view(-1)[piece]], [values.view(-1)[piece]])


@torch.no_grad()
def _read(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(values, tensors)


@torch.no_grad()
def _add(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_add_(tensors, [v.to(tensor.device) for tensor, v in zip(tensors, values, strict=True)])


@torch.no_grad()
def _write(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(tensors, values)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether numpy can use its values as they are: contiguous float32 in this machine's memory."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _items(tensor: torch.Tensor) -> Items:
    """The full blocks of a plain tensor as a (k,) view, one opaque item each.

    numpy copies such items in one piece: writing them takes a third of the time of torch's `index_copy_`.
    """
    values = tensor.detach().view(-1)[: tensor.numel() // BLOCK * BLOCK].numpy()
    return values.view(np.dtype((np.void, BLOCK * values.itemsize)))


def _take(blocks: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Copy some of (k, 64) blocks into `out`, or into a new tensor: (n, 64) float32."""
    if out is None:
        return blocks.index_select(0, index).float()
    if (blocks.dtype, blocks.device) == (out.dtype, out.device):
        return torch.index_select(blocks, 0, index, out=out)
    return out.copy_(blocks.index_select(0, index))


def _full_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """The full blocks of a contiguous tensor as a (k, 64) view, in one torch call."""
    return tensor.as_strided((tensor.numel() // BLOCK, BLOCK), (BLOCK, 1))


def _tail(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor after its last full block, as a view."""
    return tensor.view(-1)[tensor.numel() // BLOCK * BLOCK :]
