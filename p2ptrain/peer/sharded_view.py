"""The weights of a model that is sharded over a process group, as rank 0's exchange reads and writes them.

Rank 0 calls the methods of a `WeightView`. Each sends a command to the other ranks, which are in `serve` meanwhile and
do their share: they send the blocks that they hold, or write those that they receive. Rank 0 does all computing with
blocks, by the code of a peer of one process, so the weights have the same bits.

All weights at once (`read`, `write`, `add`) go parameter by parameter between each rank's row shard and rank 0's buffer
in host memory. So no device ever holds more than its row shard, and one part of a parameter in transfer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BlockPlan, IndexSpace, ParameterView, WeightChange
from p2ptrain.algorithms.row_shards import Held, RowShard, put, take
from p2ptrain.errors import PeerLostError
from p2ptrain.peer.process_group import ProcessGroup

NO_TENSORS = slice(0, 0)


class Command(IntEnum):
    """What the other ranks do next. `END`: `serve` returns."""

    END = 0
    GATHER = 1
    SCATTER = 2
    READ = 3
    WRITE = 4
    ADD = 5


class ShardedView:
    """The `WeightView` of sharded parameters; each rank has one.

    Rank 0 may call its methods while all other ranks are in `serve`, and then calls `end`. Any thread may, one at a
    time. Raises PeerLostError if a rank is lost, or fails in the middle of a command.
    """

    def __init__(
        self, space: IndexSpace, rows: Sequence[int], tensors: Sequence[torch.Tensor], ranks: ProcessGroup
    ) -> None:
        """
        Args:
            space: the flat layout of the whole parameters.
            rows: size of the first dimension of each.
            tensors: the rows that this rank holds of each, contiguous; changed in place.
            ranks: all that hold parts.
        """
        self.space = space
        self._tensors = [tensor.detach() for tensor in tensors]
        self._ranks = ranks
        self._shards = [RowShard(space, rows, rank, ranks.size) for rank in range(ranks.size)]
        self._own = self._shards[ranks.rank]
        self._view = ParameterView(self._own.space, self._own.segments(self._tensors))
        self._lock = threading.Lock()

    def gather(self, plan: BlockPlan) -> torch.Tensor:
        """As `ParameterView.gather`."""
        gathered = torch.zeros(len(plan.blocks), BLOCK, dtype=torch.float32, device="cpu")
        with self._command(Command.GATHER, plan=plan):
            for rank, shard in enumerate(self._shards):
                held = shard.held(plan.blocks)
                if rank == 0:
                    put(held, self._view.gather(self._plan(held)), gathered)
                elif len(held.rows):
                    values = torch.empty(len(held.rows), BLOCK, dtype=torch.float32, device="cpu")
                    self._ranks.receive(values, rank)
                    put(held, values, gathered)
        return gathered

    def scatter(self, plan: BlockPlan, values: torch.Tensor) -> None:
        """As `ParameterView.scatter`."""
        with self._command(Command.SCATTER, plan=plan):
            for rank, shard in enumerate(self._shards):
                held = shard.held(plan.blocks)
                if rank == 0:
                    self._view.scatter(self._plan(held), take(held, values))
                elif len(held.rows):
                    self._ranks.send(take(held, values), rank)

    def section(self, tensors: slice) -> ShardedSection:
        """As `ParameterView.section`."""
        return ShardedSection(self, tensors)

    @torch.no_grad()
    def read(self, out: torch.Tensor, tensors: slice | None = None) -> None:
        """As `ParameterView.read`, of these tensors alone."""
        tensors = tensors or slice(0, len(self._tensors))
        with self._command(Command.READ, tensors=tensors):
            for tensor, parts, padding in self._places(out, tensors):
                parts[0].copy_(tensor.view(-1))
                for rank, part in enumerate(parts[1:], start=1):
                    if len(part):
                        self._ranks.receive(part, rank)
                padding.zero_()

    def changes(self, flat: torch.Tensor, *, adds: bool, tensors: slice | None = None) -> Sequence[WeightChange]:
        """As `ParameterView.changes`, of these tensors alone, as a single change."""
        command, tensors = Command.ADD if adds else Command.WRITE, tensors or slice(0, len(self._tensors))
        return [functools.partial(self._distribute, command, flat, tensors)]

    def end(self) -> None:
        """On rank 0: let the other ranks return from `serve`."""
        with self._command(Command.END):
            pass

    def serve(self) -> None:
        """On the other ranks: do what rank 0 commands, until its `end`."""
        while True:
            header = torch.zeros(4, dtype=torch.int64, device="cpu")
            self._ranks.copy(header)
            command = Command(int(header[0]))
            blocks = torch.zeros(int(header[1]), dtype=torch.int64, device="cpu")
            tensors = self._tensors[int(header[2]) : int(header[3])]
            if command is Command.END:
                return
            if len(blocks):
                self._ranks.copy(blocks)
            held = self._own.held(blocks.numpy())
            match command:
                case Command.GATHER if len(held.rows):
                    self._ranks.send(self._view.gather(self._plan(held)), 0)
                case Command.SCATTER if len(held.rows):
                    values = torch.empty(len(held.rows), BLOCK, dtype=torch.float32, device="cpu")
                    self._ranks.receive(values, 0)
                    self._view.scatter(self._plan(held), values)
                case Command.READ:
                    for tensor in tensors:
                        if tensor.numel():
                            self._ranks.send(tensor.to(torch.float32), 0)
                case Command.WRITE | Command.ADD:
                    for tensor in tensors:
                        if tensor.numel():
                            values = torch.empty(tensor.numel(), dtype=torch.float32, device="cpu")
                            self._ranks.receive(values, 0)
                            _change(tensor, values, adds=command is Command.ADD)

    def _distribute(self, command: Command, flat: torch.Tensor, tensors: slice) -> None:
        with self._command(command, tensors=tensors):
            for tensor, parts, _ in self._places(flat, tensors):
                for rank, part in enumerate(parts[1:], start=1):
                    if len(part):
                        self._ranks.send(part, rank)
                _change(tensor, parts[0], adds=command is Command.ADD)

    def _places(
        self, flat: torch.Tensor, tensors: slice
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
        """Yield rank 0's part of each parameter, with the places of all ranks' parts in `flat` and the padding."""
        line, starts = flat.view(-1), self.space.tensor_starts - self.space.tensor_starts[tensors.start]
        for number, tensor in enumerate(self._tensors[tensors], tensors.start):
            start, stop = (int(block) * BLOCK for block in starts[number : number + 2])
            ranges = [shard.ranges[number] for shard in self._shards]
            parts = [line[start + low : start + high] for low, high in ranges]
            yield tensor, parts, line[start + self.space.numels[number] : stop]

    def _plan(self, held: Held) -> BlockPlan:
        return self._own.space.plan(held.numbers)

    @contextmanager
    def _command(
        self, command: Command, *, plan: BlockPlan | None = None, tensors: slice = NO_TENSORS
    ) -> Iterator[None]:
        """Tell the other ranks what to do with the blocks of a plan, or with these tensors."""
        assert self._ranks.rank == 0, "only rank 0 has an exchange"
        with self._lock:
            held = 0 if plan is None else len(plan.blocks)
            header = [command, held, tensors.start, tensors.stop]
            self._ranks.copy(torch.tensor(header, dtype=torch.int64, device="cpu"))
            if plan is not None and held:
                self._ranks.copy(torch.from_numpy(plan.blocks))
            try:
                yield
            except PeerLostError:
                raise
            except Exception as error:
                # The other ranks wait for the rest of the command, and would take the next one for it.
                raise PeerLostError(
                    f"rank 0 of {self._ranks.size} failed while the ranks exchanged weights ({error!r}); start all of "
                    f"them again, as torchrun --max-restarts does"
                ) from error


class ShardedSection:
    """The `FlatView` of some tensors of a sharded view."""

    def __init__(self, whole: ShardedView, tensors: slice) -> None:
        self.space = whole.space.section(tensors)
        self._whole = whole
        self._tensors = tensors

    def read(self, out: torch.Tensor) -> None:
        self._whole.read(out, self._tensors)

    def changes(self, flat: torch.Tensor, *, adds: bool) -> Sequence[WeightChange]:
        return self._whole.changes(flat, adds=adds, tensors=self._tensors)


@torch.no_grad()
def _change(tensor: torch.Tensor, values: torch.Tensor, *, adds: bool) -> None:
    """Change a row shard as `ParameterView.add` or `write` changes a tensor. `values`: float32 CPU, flat."""
    line = tensor.view(-1)
    if adds:
        line.add_(values.to(tensor.device))
    else:
        line.copy_(values)
