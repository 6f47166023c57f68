"""Blocks that are split over ranks: put together, they are those of the whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.row_shards import RowShard, put, row_range, take

# Rows that fit the ranks or not, fewer rows than ranks, no rows, blocks that lie in several ranks, and long rows.
SHAPES = [(8, 64), (7, 13), (3,), (0, 7), (10, 100), (1, 640), (129,)]
SPACE = IndexSpace([(str(shape), shape) for shape in SHAPES])
BLOCKS = st.lists(st.integers(0, SPACE.num_blocks - 1), unique=True).map(lambda blocks: np.array(sorted(blocks), int))


def new_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors[0][0, :2] = torch.tensor([-0.0, float("nan")])  # bits, not values, are copied
    return tensors


def split(tensors: list[torch.Tensor], size: int) -> list[tuple[RowShard, ParameterView]]:
    """What each rank holds of the tensors: copies, and views of them."""
    ranks = []
    for rank in range(size):
        shard = RowShard(SPACE, [shape[0] for shape in SHAPES], rank, size)
        local = [tensor[slice(*row_range(len(tensor), rank, size))].clone() for tensor in tensors]
        ranks.append((shard, ParameterView(shard.space, shard.segments(local))))
    return ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 8, 13])
def test_rows_are_cut_as_torch_cuts_them(rows: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(rows, 2).chunk(size)]
    ranges = [row_range(rows, rank, size) for rank in range(size)]
    assert [stop - start for start, stop in ranges] == [*chunks, *[0] * (size - len(chunks))]
    assert ranges[0][0] == 0
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]


@given(size=st.integers(1, 5), blocks=BLOCKS)
def test_what_the_ranks_hold_is_what_the_whole_holds(size: int, blocks: np.ndarray) -> None:
    tensors = new_tensors(0)
    whole = ParameterView(SPACE, tensors)
    out = torch.zeros(len(blocks), BLOCK)
    for shard, view in split(tensors, size):
        held = shard.held(blocks)
        put(held, view.gather(shard.space.plan(held.numbers)), out)
    assert out.numpy().tobytes() == whole.gather(SPACE.plan(blocks)).numpy().tobytes()


@given(size=st.integers(1, 5), blocks=BLOCKS)
def test_what_the_ranks_set_is_what_the_whole_sets(size: int, blocks: np.ndarray) -> None:
    tensors = new_tensors(0)
    ranks = split(tensors, size)
    values = torch.randn(len(blocks), BLOCK, generator=torch.Generator().manual_seed(1))
    ParameterView(SPACE, tensors).scatter(SPACE.plan(blocks), values)
    for (shard, view), (_, expected) in zip(ranks, split(tensors, size), strict=True):
        held = shard.held(blocks)
        view.scatter(shard.space.plan(held.numbers), take(held, values))
        for ours, theirs in zip(view.tensors, expected.tensors, strict=True):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()
