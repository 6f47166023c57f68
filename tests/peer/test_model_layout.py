"""The layout of a user's model: what is exchanged, what a joiner downloads, and what must be equal on all peers."""

from __future__ import annotations

import gc
import math
import re

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from p2ptrain.algorithms.transfers import FlatAtOnce, FlatInPieces, FragmentsAtOnce
from p2ptrain.errors import ConfigError, RunMismatchError, WireError
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.settings.config import RunConfig


class Tied(nn.Module):
    """A model whose embedding and output layer share a matrix, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.output = nn.Linear(8, 10)
        self.output.weight = self.embedding.weight


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))


def broken() -> nn.Module:
    """Its running mean is not finite."""
    model = normed()
    model(torch.full((4, 6), math.nan))
    return model


# --- what is exchanged -------------------------------------------------------------------------------------------


def test_tied_weights_appear_once() -> None:
    parts = ModelParts(Tied())
    assert parts.space.names == ["embedding.weight", "output.bias"]
    assert parts.space.numel == 10 * 8 + 10


def test_the_tensors_are_the_live_parameters() -> None:
    model = normed()
    parts = ModelParts(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert [tensor.data_ptr() for tensor in parts.tensors] == pointers
    parts.tensors[0] += 1
    assert torch.equal(model[0].weight, parts.tensors[0])
    assert not any(tensor.requires_grad for tensor in parts.tensors)


def test_weights_in_host_memory_are_read_and_written_in_pieces() -> None:
    """What a GPU has is in tests/gpu."""
    transfers = ModelParts(nn.Linear(2, 2)).transfers()
    assert isinstance(transfers.fragments, FragmentsAtOnce)
    assert isinstance(transfers.flat, FlatInPieces)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_floating_point_type_is_read_and_written(dtype: torch.dtype) -> None:
    from p2ptrain.algorithms.indexspace import ParameterView

    model = normed().to(dtype)
    parts = ModelParts(model)
    view = ParameterView(parts.space, parts.tensors)
    flat = torch.zeros(parts.space.num_blocks, 64)
    view.read(flat)
    assert torch.equal(parts.unflatten(flat)["0.weight"], model[0].weight.float())
    FlatAtOnce(view).land(torch.full_like(flat, 0.5), adds=False).finish()
    assert all((parameter == 0.5).all() and parameter.dtype == dtype for parameter in model.parameters())


def test_parameters_may_be_of_several_types_and_lie_anyhow_in_memory() -> None:
    from p2ptrain.algorithms.indexspace import ParameterView

    model = nn.ParameterList(
        [
            nn.Parameter(torch.arange(70.0).reshape(10, 7).t()),
            nn.Parameter(torch.arange(5.0, dtype=torch.float64)[::2]),
            nn.Parameter(torch.zeros(3, 64, dtype=torch.bfloat16)),
            nn.Parameter(torch.tensor(7.0)),
        ]
    )
    parts = ModelParts(model)
    assert not model[0].is_contiguous()
    view = ParameterView(parts.space, parts.tensors)
    flat = torch.empty(parts.space.num_blocks, 64)
    view.read(flat)
    named = parts.unflatten(flat)
    for name, parameter in model.named_parameters():
        assert torch.equal(named[name], parameter.detach().float())
    FlatAtOnce(view).land(torch.ones_like(flat), adds=True).finish()
    assert torch.equal(model[0], torch.arange(70.0).reshape(10, 7).t() + 1)
    assert model[3] == 8


def test_unflattening_gives_every_parameter_by_name_without_a_copy() -> None:
    model = Tied()
    parts = ModelParts(model)
    flat = torch.arange(parts.space.num_blocks * 64.0).reshape(-1, 64)
    named = parts.unflatten(flat)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == {
        "embedding.weight": (10, 8),
        "output.bias": (10,),
    }
    named["output.bias"][0] = -1
    assert flat[2, 0] == -1


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        pytest.param("a string", "model = str: must be a torch.nn.Module", id="no module"),
        pytest.param(nn.ReLU(), "no parameter with requires_grad=True", id="no parameters"),
        pytest.param(nn.Linear(2, 2).requires_grad_(False), "nothing to train", id="all frozen"),
        pytest.param(
            nn.ParameterDict({"wave": nn.Parameter(torch.zeros(3, dtype=torch.complex64))}),
            "parameter wave is of type torch.complex64: only floating-point",
            id="complex",
        ),
        pytest.param(
            nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device: materialise", id="meta device"
        ),
        pytest.param(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta").requires_grad_(False)),
            "parameter 1.weight is on the meta device: materialise",
            id="frozen on the meta device",
        ),
        pytest.param(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta")),
            "buffer 1.running_mean is on the meta device: materialise",
            id="buffer on the meta device",
        ),
        pytest.param(nn.LazyLinear(3), "parameter weight has no shape yet", id="lazy"),
    ],
)
def test_tensors_that_cannot_be_trained_together_are_named(model: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        ModelParts(model)  # type: ignore[arg-type]


def test_parameters_that_are_no_numbers_of_ours_may_be_frozen() -> None:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    model.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
    assert ModelParts(model).space.names == ["weight", "bias"]


# --- what must be equal on all peers -----------------------------------------------------------------------------


def layout(model: nn.Module) -> str:
    return ModelParts(model).layout


def frozen_part(**changes: object) -> nn.Module:
    model = normed()
    model[0].requires_grad_(False)
    for name, value in changes.items():
        getattr(model[0], name).data = value  # type: ignore[union-attr]
    return model


def test_the_layout_is_blind_to_trainable_values_and_buffers() -> None:
    assert layout(normed(0)) == layout(normed(1))
    trained = normed()
    trained[1].running_mean += 1
    trained[0].weight.data = trained[0].weight.data.t().contiguous().t()
    assert layout(trained) == layout(normed())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double(), id="type"),
        pytest.param(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), id="shape"),
        pytest.param(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5)), id="name"),
        pytest.param(nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)), id="one less"),
        pytest.param(frozen_part(), id="frozen"),
    ],
)
def test_the_layout_sees_names_shapes_types_and_what_is_trained(other: nn.Module) -> None:
    assert layout(other) != layout(normed())


def test_frozen_values_are_part_of_the_layout() -> None:
    base = layout(frozen_part())
    assert layout(frozen_part()) == base
    weight = frozen_part()[0].weight.data  # type: ignore[union-attr]
    assert layout(frozen_part(weight=weight.clone())) == base
    assert layout(frozen_part(weight=weight.t().contiguous().t())) == base
    changed = weight.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    assert layout(frozen_part(weight=changed)) != base


def test_another_model_is_refused_with_the_numbers_of_both() -> None:
    run = ModelParts(nn.Linear(3, 2)).with_layout(RunConfig(run_id="r"))
    sizes = "yours has 6 trained parameters in 1 tensor, hash .{12}, that of run 'r' 8 trained parameters in 2 tensors"
    with pytest.raises(RunMismatchError, match=f"^model: {sizes}, hash .{{12}}; build the same"):
        ModelParts(nn.Linear(3, 2, bias=False)).with_layout(run)
    assert ModelParts(nn.Linear(3, 2)).with_layout(run) == run


# --- what a joiner downloads -------------------------------------------------------------------------------------


def test_a_joiner_adopts_buffers_in_place() -> None:
    donor, joiner = normed(0), normed(1)
    donor.train()
    donor(torch.randn(20, 6))
    pointer = joiner[1].running_mean.data_ptr()
    ModelParts(joiner).load_buffers(ModelParts(donor).buffers())
    for name, buffer in donor.named_buffers():
        assert torch.equal(joiner.get_buffer(name), buffer)
    assert joiner[1].num_batches_tracked == 1
    assert joiner[1].running_mean.data_ptr() == pointer
    assert not torch.equal(joiner[0].weight, donor[0].weight)


def test_buffers_that_the_model_does_not_save_stay_local() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(1000), persistent=False)
    assert ModelParts(model).buffers() == b""
    ModelParts(model).load_buffers(b"")
    model.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16)[::2])
    assert set(safetensors.torch.load(ModelParts(model).buffers())) == {"scale"}


def test_a_buffer_under_two_names_is_sent_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = torch.arange(5.0)
    model[0].register_buffer("table", shared)
    model[1].register_buffer("table", shared)
    parts = ModelParts(model)
    data = parts.buffers()
    shared += 1
    parts.load_buffers(data)
    assert torch.equal(model[1].table, torch.arange(5.0))


def test_a_mask_of_infinities_is_adopted() -> None:
    donor, joiner = nn.Linear(2, 2), nn.Linear(2, 2)
    for model, scale in ((donor, 2.0), (joiner, 1.0)):
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]).to(torch.float16))
        model.register_buffer("scale", torch.tensor([scale]).to(torch.float8_e4m3fn))
    assert len(ModelParts(donor).buffers()) < ModelParts(joiner).most_buffer_bytes()
    ModelParts(joiner).load_buffers(ModelParts(donor).buffers())
    assert joiner.scale.float() == 2


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff" * 100, id="noise"),
        pytest.param(ModelParts(normed()).buffers()[:-1], id="truncated"),
        pytest.param(safetensors.torch.save({"1.running_mean": torch.zeros(5)}), id="some missing"),
        pytest.param(ModelParts(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(4))).buffers(), id="other shapes"),
        pytest.param(ModelParts(normed().double()).buffers(), id="other types"),
        pytest.param(ModelParts(broken()).buffers(), id="not finite"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_and_change_nothing(data: bytes) -> None:
    model = normed()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(WireError):
        ModelParts(model).load_buffers(data)
    assert all(torch.equal(model.get_buffer(name), buffer) for name, buffer in before.items())


def replace_the_last(model: nn.Module) -> None:
    model[1].bias = nn.Parameter(model[1].bias.detach().clone())


def point_the_last_elsewhere(model: nn.Module) -> None:
    model[1].bias.data = model[1].bias.data.clone()


@pytest.mark.parametrize(
    "move",
    [
        nn.Module.double, lambda model: model.to("meta"), lambda model: model.half().float(), nn.Module.share_memory,
        replace_the_last, point_the_last_elsewhere,
    ],
)  # fmt: skip
def test_a_model_that_is_moved_later_is_noticed(move) -> None:
    """Also where only the memory of its tensors moves, as into shared memory, or where only one is replaced."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    parts = ModelParts(model)
    parts.check_in_place()
    move(model)
    with pytest.raises(ConfigError, match="move it first, then join"):
        parts.check_in_place()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_parameter_at_its_old_address_whose_memory_was_freed_in_between_is_noticed() -> None:
    """As after `share_memory()`, and then `p.data = p.data.clone()`, which may get the freed memory."""
    model = nn.Linear(4, 4)
    parts = ModelParts(model, None)
    parts.check_in_place()
    parts.tensors[0] = parts.tensors[0].clone()
    with pytest.raises(ConfigError, match=r"1 parameters of the model, such as weight, were moved"):
        parts.check_in_place()


def test_a_script_module_that_is_moved_later_is_noticed() -> None:
    model = torch.jit.script(normed())
    parts = ModelParts(model)
    parts.check_in_place()
    model.double()
    with pytest.raises(ConfigError, match=r"4 parameters of the model, such as 0\.weight, were moved"):
        parts.check_in_place()


class Adapted(nn.Module):
    """A frozen layer with something trainable beside it, as LoRA."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(torch.zeros(2, 2))


def test_a_buffer_that_the_model_has_replaced_is_the_one_that_is_sent_and_loaded() -> None:
    donor, joiner = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    parts, theirs = ModelParts(donor), ModelParts(joiner)
    donor.running_mean = torch.tensor([5.0, 6.0])
    joiner.running_mean = torch.zeros(2)
    theirs.load_buffers(parts.buffers())
    assert joiner.running_mean.tolist() == [5.0, 6.0]


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def adapt(model: nn.Sequential) -> None:
    model[2] = Adapted(model[2])


def adapt_inside(model: nn.Sequential) -> None:
    model[1].adapter = nn.Linear(2, 2)


def unfreeze(model: nn.Sequential) -> None:
    model[2].bias.requires_grad_()


def add_to_a_module_that_has_none(model: nn.Sequential) -> None:
    model[3].slope = nn.Parameter(torch.ones(1))


def change_places(model: nn.Sequential) -> None:
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def partly_frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.ReLU())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (append, "2 parameters of the model, such as 4.weight, became trainable"),
        (adapt, "1 parameters of the model, such as 2.low, became trainable"),
        (adapt_inside, "2 parameters of the model, such as 1.adapter.weight, became trainable"),
        (unfreeze, "1 parameters of the model, such as 2.bias, became trainable"),
        (add_to_a_module_that_has_none, "1 parameters of the model, such as 3.slope, became trainable"),
        (change_places, "2 parameters of the model, such as 0.weight, were moved, replaced or removed"),
        (lambda model: model.pop(1), "such as 1.weight, were moved, replaced or removed"),
        (lambda model: parametrizations.weight_norm(model[0]), "1 parameters of the model, such as 0.weight, were"),
        (lambda model: setattr(model, "1", nn.Linear(2, 5)), "such as 1.weight, were moved"),
        (lambda model: model.load_state_dict(partly_frozen().state_dict(), assign=True), "4 parameters of the model"),
    ],
)
def test_parameters_that_come_or_go_later_are_noticed(change, complaint: str) -> None:
    model = partly_frozen()
    parts = ModelParts(model)
    parts.check_in_place()
    change(model)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parts.check_in_place()


def test_what_is_not_trained_may_change_and_training_may_pause() -> None:
    model = partly_frozen()
    parts = ModelParts(model)
    model[1].requires_grad_(False)
    prune.random_unstructured(model[0], "bias", 1)  # which keeps the parameter, under another name
    parts.check_in_place()
    model[3] = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Dropout())
    parts.check_in_place()
    model[3][0].weight.requires_grad_()
    with pytest.raises(ConfigError, match=re.escape("such as 3.0.weight, became trainable")):
        parts.check_in_place()


def test_another_model_is_told_from_one_with_the_same_parameters_or_with_hidden_ones() -> None:
    model, shares, other = (nn.Linear(3, 3) for _ in range(3))
    parts = ModelParts(model)
    shares.weight = nn.Parameter(model.weight.detach())  # two parameters in one memory
    for same in (model, nn.Sequential(model), nn.DataParallel(model), torch.compile(model), shares):
        assert parts.shares_weights_with(same)
    assert not parts.shares_weights_with(other)
    other.weight.data = torch.empty(0)  # as between the steps of DeepSpeed's third stage
    assert parts.shares_weights_with(other)


def test_a_model_that_was_dropped_without_leaving_is_free_again() -> None:
    model = nn.Linear(3, 3)
    parts = ModelParts(model)
    parts.claim()
    with pytest.raises(ConfigError, match="belong to another peer in this process"):
        ModelParts(model).claim()
    del parts
    gc.collect()
    again = ModelParts(model)
    again.claim()
    again.release()
    again.release()
    ModelParts(model).claim()
