"""A sharded view on a real gloo group, whose ranks are threads: it does what a view of the whole weights does."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.mixing import Mixing
from p2ptrain.algorithms.row_shards import row_range
from p2ptrain.algorithms.transfers import FlatAtOnce
from p2ptrain.errors import PeerLostError
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.peer.sharded_view import ShardedView
from tests.peer.ranks import on_all_ranks

# Rows that do not fit the ranks, fewer rows than ranks, and blocks that lie in several of them.
SHAPES = [(7, 13), (4, 64), (1, 130), (0, 3), (90,)]
SPACE = IndexSpace([(str(shape), shape) for shape in SHAPES])
PLAN = SPACE.plan(np.arange(SPACE.num_blocks)[::2])


def whole(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def own_rows(tensors: list[torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    return [tensor[slice(*row_range(len(tensor), rank, size))].clone() for tensor in tensors]


def sharded_view(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> ShardedView:
    return ShardedView(SPACE, [shape[0] for shape in SHAPES], tensors, ProcessGroup(group, torch.device("cpu")))


def use(view: ParameterView | ShardedView) -> list[torch.Tensor]:
    """Call everything that changes weights; return what was read, and the distances."""
    generator = torch.Generator().manual_seed(1)
    received = torch.randn(len(PLAN.blocks), 64, generator=generator)
    flat = torch.randn(SPACE.num_blocks, 64, generator=generator)
    read = [view.gather(PLAN)]
    mixed = Mixing(view, PLAN, received).mix(torch.full((len(received), 1), 0.25), math.inf)
    clipped = Mixing(view, PLAN, 100 * received).mix(0.5, 1.0)
    read.append(torch.tensor([mixed, clipped], dtype=torch.float64))
    Mixing(view, PLAN, received).mix(0.5, math.inf)
    FlatAtOnce(view).land(flat, adds=True).finish()
    read.append(torch.full((SPACE.num_blocks, 64), torch.nan))
    view.read(read[-1])
    FlatAtOnce(view).land(0.3 * flat, adds=False).finish()
    view.scatter(SPACE.plan([0, 1]), received[:2])
    read.append(torch.full((SPACE.num_blocks, 64), torch.nan))
    view.read(read[-1])
    for tensors in SPACE.sections(2):
        section = view.section(tensors)
        FlatAtOnce(section).land(torch.ones(section.space.num_blocks, 64), adds=True).finish()
        read.append(torch.full((section.space.num_blocks, 64), torch.nan))
        section.read(read[-1])
    return read


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32)])
def test_it_reads_and_writes_the_bits_of_the_whole(size: int, dtype: torch.dtype) -> None:
    expected = whole(dtype)
    expected_read = use(ParameterView(SPACE, expected))

    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tensors = own_rows(whole(dtype), rank, size)
        view, read = sharded_view(tensors, group), list[torch.Tensor]()
        if rank == 0:
            read = use(view)
            view.end()
        else:
            view.serve()
        return tensors, read

    for rank, (tensors, read) in enumerate(on_all_ranks(work, size=size)):
        for ours, theirs in zip(tensors, own_rows(expected, rank, size), strict=True):
            assert torch.equal(ours, theirs)
        if rank == 0:
            assert [values.numpy().tobytes() for values in read] == [v.numpy().tobytes() for v in expected_read]


CALLS: list[Callable[[ShardedView], object]] = [
    lambda view: view.gather(PLAN),
    lambda view: view.scatter(PLAN, torch.zeros(len(PLAN.blocks), 64)),
    lambda view: view.read(torch.zeros(SPACE.num_blocks, 64)),
    lambda view: FlatAtOnce(view).land(torch.zeros(SPACE.num_blocks, 64), adds=True).finish(),
]


@pytest.mark.parametrize("call", CALLS, ids=["gather", "scatter", "read", "add"])
def test_a_lost_rank_is_reported(call: Callable[[ShardedView], object]) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        view = sharded_view(own_rows(whole(torch.float32), rank, 3), group)
        if rank == 0:
            with pytest.raises(PeerLostError, match="rank 0 of 3 has lost"):
                for _ in range(3):  # the first messages may be on their way
                    call(view)
        elif rank == 2:
            with pytest.raises(PeerLostError, match="rank 2 of 3 has lost"):
                view.serve()

    on_all_ranks(work, timeout_s=20)


def test_an_error_in_the_middle_of_a_command_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would take the next command for the rest of this one."""

    def short_of_memory(plan: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def work(rank: int, group: dist.ProcessGroup) -> None:
        view = sharded_view(whole(torch.float32), group)
        monkeypatch.setattr(view._view, "gather", short_of_memory)
        with pytest.raises(PeerLostError, match=r"rank 0 of 1 failed .*CUDA out of memory"):
            view.gather(PLAN)

    on_all_ranks(work, size=1)
