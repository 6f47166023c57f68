import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.algorithms import joined_tensors
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.indexspace import BlockPlan, IndexSpace, ParameterView
from p2ptrain.algorithms.mixing import Mixing
from p2ptrain.algorithms.transfers import FlatAtOnce

# Full blocks only, a short tail, a scalar, nothing at all, less than a block, and a stack of tails.
SHAPES = [(4, 64), (5, 13), (), (0, 7), (3,), (2, 3, 5, 7)]


def make_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def make_view(tensors: list[torch.Tensor]) -> ParameterView:
    return ParameterView(IndexSpace([(f"t{i}", tuple(t.shape)) for i, t in enumerate(tensors)]), tensors)


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Reference: the flat layout."""
    lines = []
    for tensor in tensors:
        line = tensor.detach().float().flatten().tolist()
        lines += line + [0.0] * (-len(line) % BLOCK)
    return torch.tensor(lines).view(-1, BLOCK)


def some_plan(view: ParameterView) -> BlockPlan:
    """Every second block, tails among them."""
    blocks = np.arange(view.space.num_blocks)[::-2]
    return view.space.plan(blocks)


def randn(plan: BlockPlan, seed: int = 1) -> torch.Tensor:
    return torch.randn(len(plan.blocks), BLOCK, generator=torch.Generator().manual_seed(seed))


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def inside_a_larger_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((5,), 9.0, dtype=tensor.dtype), tensor.flatten()])[5:].view(tensor.shape)


LAYOUTS = [lambda tensor: tensor, channels_last, transposed, strided, inside_a_larger_storage, torch.nn.Parameter]


def test_the_layout_pads_each_tensor_to_whole_blocks() -> None:
    space = IndexSpace([("a", (4, 64)), ("b", (65,)), ("c", ())])
    assert space.names == ["a", "b", "c"]
    assert space.numels == [256, 65, 1]
    assert space.tensor_starts.tolist() == [0, 4, 6, 7]
    assert (space.num_blocks, space.numel) == (7, 322)


def test_a_plan_sorts_its_blocks_and_counts_true_parameters() -> None:
    plan = IndexSpace([("a", (4, 64)), ("b", (65,)), ("c", ())]).plan(np.array([6, 0, 5, 3]))
    assert plan.blocks.tolist() == [0, 3, 5, 6]
    assert plan.numel == 64 + 64 + 1 + 1


@pytest.mark.parametrize("blocks", [[-1], [3], [0, 1, 1], [2, 0, 2]])
def test_a_plan_refuses_blocks_out_of_range_or_given_twice(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        IndexSpace([("a", (150,))]).plan(np.array(blocks))


def test_a_view_refuses_tensors_of_other_sizes() -> None:
    with pytest.raises(ValueError, match="sizes"):
        ParameterView(IndexSpace([("a", (3,))]), [torch.zeros(4)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_operation_agrees_with_the_plain_flat_vector(layout, dtype: torch.dtype) -> None:
    tensors = [layout(tensor) for tensor in make_tensors(dtype)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    view = make_view(tensors)
    plan = some_plan(view)
    before = flatten(tensors)
    read = torch.full_like(before, torch.nan)

    view.read(read)
    assert torch.equal(read, before)
    assert torch.equal(view.gather(plan), before[plan.blocks])

    received = randn(plan)
    expected = before.clone()
    expected[plan.blocks] += 0.25 * (received - expected[plan.blocks])
    Mixing(view, plan, received).mix(0.25, math.inf)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    mask = flatten([torch.ones(shape) for shape in SHAPES])
    torch.testing.assert_close(flatten(tensors), expected * mask, rtol=tolerance, atol=tolerance)

    others = [layout(torch.zeros_like(tensor)) for tensor in tensors]
    make_view(others).scatter(plan, view.gather(plan))
    assert torch.equal(flatten(others)[plan.blocks], flatten(tensors)[plan.blocks])
    assert flatten(others).count_nonzero() == flatten(tensors)[plan.blocks].count_nonzero()

    change = torch.randn(before.shape, generator=torch.Generator().manual_seed(2))
    exact = [t.detach().clone().double() for t in tensors]
    FlatAtOnce(view).land(change, adds=True).finish()
    sums = [(t + c).to(dtype) for t, c in zip(exact, unflatten(change), strict=True)]
    torch.testing.assert_close(flatten(tensors), flatten(sums), rtol=tolerance, atol=tolerance)

    FlatAtOnce(view).land(before, adds=False).finish()
    assert torch.equal(flatten(tensors), before)
    assert [tensor.data_ptr() for tensor in tensors] == pointers


def unflatten(flat: torch.Tensor) -> list[torch.Tensor]:
    parts, line = [], flat.flatten()
    for shape in SHAPES:
        numel = int(np.prod(shape))
        parts.append(line[:numel].view(shape))
        line = line[numel + -numel % BLOCK :]
    return parts


def test_blocks_outside_the_plan_keep_their_bits() -> None:
    tensors = make_tensors()
    view = make_view(tensors)
    plan = some_plan(view)
    before = flatten(tensors)
    Mixing(view, plan, randn(plan)).mix(0.5, math.inf)
    others = np.setdiff1d(np.arange(view.space.num_blocks), plan.blocks)
    assert torch.equal(flatten(tensors)[others], before[others])
    assert not torch.equal(flatten(tensors)[plan.blocks], before[plan.blocks])


def test_mix_takes_a_weight_for_each_block() -> None:
    tensors = make_tensors()
    view = make_view(tensors)
    plan = some_plan(view)
    before, received = view.gather(plan), randn(plan)
    weight = torch.linspace(0, 1, len(plan.blocks))[:, None]
    Mixing(view, plan, received).mix(weight, math.inf)
    after = view.gather(plan)
    assert torch.equal(after[0], before[0])
    full = after[-1] != 0
    torch.testing.assert_close(after[-1][full], received[-1][full])
    mask = flatten([torch.ones(shape) for shape in SHAPES])[plan.blocks]
    torch.testing.assert_close(after, mask * (before + weight * (received - before)))


def test_a_gather_is_a_copy_and_repeats_itself() -> None:
    view = make_view(make_tensors())
    plan = some_plan(view)
    first = view.gather(plan)
    assert torch.equal(view.gather(plan), first)
    kept = first.clone()
    Mixing(view, plan, randn(plan)).mix(0.5, math.inf)
    assert torch.equal(first, kept)


def test_mixing_both_ways_keeps_the_mean_exactly() -> None:
    """Multiples of 2 below 2^20 have exact halves and sums, so not one bit may be lost."""
    ours, theirs = ([(t * 2**16).round() * 2 for t in make_tensors(seed=seed)] for seed in (1, 2))
    our_view, their_view = make_view(ours), make_view(theirs)
    plan = some_plan(our_view)
    total = flatten(ours) + flatten(theirs)
    our_blocks, their_blocks = our_view.gather(plan), their_view.gather(plan)
    Mixing(our_view, plan, their_blocks).mix(0.5, math.inf)
    Mixing(their_view, plan, our_blocks).mix(0.5, math.inf)
    assert torch.equal(flatten(ours) + flatten(theirs), total)
    assert torch.equal(our_view.gather(plan), their_view.gather(plan))


def test_an_empty_plan_does_nothing() -> None:
    view = make_view(make_tensors())
    plan = view.space.plan(np.array([], np.int64))
    assert view.gather(plan).shape == (0, BLOCK)
    assert Mixing(view, plan, torch.zeros(0, BLOCK)).mix(0.5, 1.0) == 0.0


def test_an_optimizer_made_earlier_keeps_working() -> None:
    parameter = torch.nn.Parameter(torch.ones(70))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    view = make_view([parameter])
    FlatAtOnce(view).land(torch.full((2, BLOCK), 3.0), adds=False).finish()
    (parameter.sum() * 2).backward()
    optimizer.step()
    assert parameter.detach().tolist() == [1.0] * 70
    assert view.gather(view.space.plan([1]))[0].tolist() == [1.0] * 6 + [0.0] * 58


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=8),
    data=st.data(),
)
def test_gather_and_mix_agree_with_the_flat_vector_for_any_shapes(shapes, data) -> None:
    count = 0
    tensors = []
    for shape in shapes:
        numel = int(np.prod(shape))
        tensors.append(torch.arange(count + 1, count + 1 + numel, dtype=torch.float32).view(shape))
        count += numel
    view = make_view(tensors)
    flat = flatten(tensors)
    assert flat.shape == (view.space.num_blocks, BLOCK)
    chosen = data.draw(st.sets(st.integers(0, max(0, view.space.num_blocks - 1)), max_size=view.space.num_blocks))
    plan = view.space.plan(data.draw(st.permutations(sorted(chosen))))
    assert torch.equal(view.gather(plan), flat[plan.blocks])
    Mixing(view, plan, -flat[plan.blocks]).mix(0.5, math.inf)
    flat[plan.blocks] = 0
    assert torch.equal(flatten(tensors), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_that_lie_whole_rows_apart_are_read_and_written_together(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are all of a model on a GPU, where an allocation begins at a multiple of 512 bytes. Others go one by one."""
    apart = make_tensors(dtype)
    theirs = make_view(apart)
    monkeypatch.setattr(joined_tensors, "JOINED_ON", {"cpu"})
    memory = torch.zeros(100 * BLOCK, dtype=dtype)
    together = [
        places[: t.numel()].view(t.shape).copy_(t) for places, t in zip(memory.split(10 * BLOCK), apart, strict=False)
    ]
    ours = make_view(together)
    plan = some_plan(ours)
    assert all(piece.is_tail for piece in ours.place(plan).apart)
    assert torch.equal(ours.gather(plan), theirs.gather(plan))
    for view in (ours, theirs):
        view.scatter(plan, randn(plan))
    assert torch.equal(flatten(together), flatten(apart))
    used = sum(tensor.count_nonzero() for tensor in together)
    assert memory.count_nonzero() == used  # nothing between them was written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_a_model_without_short_blocks_one_call_reads_or_writes_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_tensors, "JOINED_ON", {"cpu"})
    memory = torch.randn(50 * BLOCK).to(dtype)
    before = memory.clone()
    space = IndexSpace([("a", (2, BLOCK)), ("b", (3 * BLOCK,))])
    view = ParameterView(space, [memory[10 * BLOCK : 12 * BLOCK].view(2, BLOCK), memory[40 * BLOCK : 43 * BLOCK]])
    plan = space.plan([4, 1, 2])
    assert view.place(plan).all_joined
    rows = [11, 40, 42]
    values, out = view.gather(plan), torch.empty(3, BLOCK)
    assert torch.equal(values, before.view(-1, BLOCK)[rows].float())
    assert torch.equal(view.gather_on_device(view.place(plan), out), values)
    assert torch.equal(out, values)
    view.scatter(plan, values + 1)
    before.view(-1, BLOCK)[rows] = (values + 1).to(dtype)
    assert torch.equal(memory, before)


def test_on_a_device_a_model_of_less_than_a_row_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_tensors, "JOINED_ON", {"cpu"})
    tensors = [torch.arange(1.0, 6.0), torch.full((BLOCK - 1,), 7.0)]
    view = ParameterView(IndexSpace([("a", (5,)), ("b", (BLOCK - 1,))]), tensors)
    plan = view.space.plan([0, 1])
    values = view.gather(plan)
    assert values[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert values[1].tolist() == [7.0] * (BLOCK - 1) + [0.0]
    view.scatter(plan, values + 1)
    assert tensors[0].tolist() == [2, 3, 4, 5, 6]
    assert tensors[1].tolist() == [8.0] * (BLOCK - 1)


def test_on_a_device_one_change_lands_all_tensors_of_a_kind() -> None:
    """On the device that needs no memory, and has no values."""
    tensors = [tensor.to("meta") for tensor in [*make_tensors(), *make_tensors(torch.bfloat16)]]
    view = ParameterView(IndexSpace([(f"t{i}", tuple(t.shape)) for i, t in enumerate(tensors)]), tensors)
    flat = torch.empty(view.space.num_blocks, BLOCK, device="meta")
    for adds in (True, False):
        changes = view.changes(flat, adds=adds)
        assert len(changes) == 2
        for change in changes:
            change()
    view.read(flat)


def test_a_plan_of_another_space_is_refused() -> None:
    tensors = [torch.zeros(4, BLOCK)]
    view, before = make_view(tensors), torch.zeros(4, BLOCK)
    plan = IndexSpace([("a", (100, BLOCK))]).plan([50])
    for work in (
        lambda: view.gather(plan),
        lambda: view.scatter(plan, torch.ones(1, BLOCK)),
        lambda: Mixing(view, plan, torch.ones(1, BLOCK)),
    ):
        with pytest.raises(ValueError, match="another index space"):
            work()
    assert torch.equal(tensors[0], before)


def test_a_copy_of_a_view_has_tensors_of_its_own() -> None:
    view = make_view([torch.zeros(4, BLOCK)])
    other = copy.deepcopy(view)
    other.scatter(other.space.plan([1]), torch.ones(1, BLOCK))
    assert not view.tensors[0].any()
    assert other.tensors[0].sum() == BLOCK


# --- sections ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=12), count=st.integers(1, 9))
def test_sections_are_runs_of_tensors_that_cover_all_and_none_is_empty(sizes: list[int], count: int) -> None:
    space = IndexSpace([(str(number), (size,)) for number, size in enumerate(sizes)])
    sections = space.sections(count)
    assert [number for tensors in sections for number in range(tensors.start, tensors.stop)] == list(range(len(sizes)))
    if space.num_blocks:
        assert len(sections) == min(count, sum(size > 0 for size in sizes))
        assert all(space.section(tensors).num_blocks for tensors in sections)
        assert sum(space.section(tensors).num_blocks for tensors in sections) == space.num_blocks


def test_sections_have_about_equal_sizes() -> None:
    """As those of GPT-2: an embedding, and 12 layers of four matrices."""
    layers = [(f"{layer}.{n}", (n, 768)) for layer in range(12) for n in (2304, 768, 3072, 3072)]
    space = IndexSpace([("wte", (50257, 768)), ("wpe", (1024, 768)), *layers])
    shares = [space.section(tensors).num_blocks / space.num_blocks for tensors in space.sections(5)]
    assert shares[0] == pytest.approx(0.31, abs=0.005)  # the embedding
    assert shares[1:] == pytest.approx([0.17] * 4, abs=0.02)


def test_the_view_of_a_section_reads_and_changes_its_tensors_alone() -> None:
    tensors = [torch.randn(3, 50), torch.randn(70), torch.randn(5, 64), torch.randn(64, 2).T]
    space = IndexSpace([(str(number), tuple(tensor.shape)) for number, tensor in enumerate(tensors)])
    view, before = ParameterView(space, tensors), [tensor.clone() for tensor in tensors]
    section = view.section(slice(1, 3))
    out = torch.full((section.space.num_blocks, 64), torch.nan)
    section.read(out)
    whole = torch.empty(space.num_blocks, 64)
    view.read(whole)
    start = int(space.tensor_starts[1])
    assert torch.equal(out, whole[start : start + len(out)])
    FlatAtOnce(section).land(torch.ones_like(out), adds=True).finish()
    assert [torch.equal(now, then + n) for n, now, then in zip((0, 1, 1, 0), tensors, before, strict=True)] == [
        True
    ] * 4
