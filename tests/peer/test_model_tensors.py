"""The names of a model's tensors, and which tensors a run refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from p2ptrain.errors import ConfigError
from p2ptrain.peer import model_tensors
from p2ptrain.peer.model_layout import ModelParts

DENSE = "must be dense (torch.strided); convert it with to_dense(), or make it a buffer with persistent=False"
SHARED = "has several elements in one place of memory, as after expand(), so it cannot be written: make it a clone()"
UNSENT = "which safetensors does not send to joining peers: convert it, or register it with persistent=False"

FP8 = "to which torch cannot add: keep what is trained in bfloat16 or wider"


def test_a_module_of_ones_own_may_be_called_module() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert ModelParts(model).space.names == ["module.weight", "module.bias"]


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize")
@pytest.mark.parametrize(
    ("make", "buffer", "trainable", "frozen"),
    [
        (lambda: torch.zeros(1).expand(5), SHARED, SHARED, ""),
        (lambda: torch.zeros(6).as_strided((4, 3), (1, 1)), SHARED, SHARED, ""),
        (lambda: torch.eye(3).to_sparse(), f"is of layout torch.sparse_coo: {DENSE}", DENSE, DENSE),
        (lambda: torch.eye(3).to_sparse_csr(), f"is of layout torch.sparse_csr: {DENSE}", DENSE, DENSE),
        (lambda: torch.eye(3).to_mkldnn(), DENSE, DENSE, DENSE),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), f"is nested: {DENSE}", DENSE, DENSE),
        (lambda: torch.zeros(3, dtype=torch.complex128), f"of type torch.complex128, {UNSENT}", "complex128: only", ""),
        (lambda: torch.zeros(3).to(torch.float8_e8m0fnu), f"of type torch.float8_e8m0fnu, {UNSENT}", FP8, ""),
        (lambda: torch.zeros(3).to(torch.float8_e4m3fn), "", FP8, ""),
        (lambda: torch.zeros(3).to(torch.float8_e5m2), "", FP8, ""),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8), f"quint8, {UNSENT}", None, ""),
        (lambda: torch._neg_view(torch.zeros(3)), "lazily negated", "lazily negated", ""),
        (inferred, "", "was made in torch.inference_mode(), so it cannot be trained: build the model outside", ""),
    ],
)
def test_tensors_that_cannot_be_carried_are_refused_by_name(
    make, buffer: str, trainable: str | None, frozen: str
) -> None:
    """ "": it is carried; None: torch makes no such parameter."""

    def check(model: nn.Module, complaint: str) -> None:
        if complaint:
            with pytest.raises(ConfigError, match=f"odd {re.escape(complaint)}|odd .*{re.escape(complaint)}"):
                ModelParts(model)
        else:
            parts = ModelParts(model)
            parts.load_buffers(parts.buffers())

    def model(requires_grad: bool) -> nn.Module:
        made, held = make(), nn.Linear(2, 2)
        held.odd = made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad)
        if made.is_inference() and not requires_grad:
            held.odd = nn.Parameter(made.data, False)
        return held

    local, saved = nn.Linear(2, 2), nn.Linear(2, 2)
    local.register_buffer("odd", make().detach(), persistent=False)
    saved.register_buffer("odd", make().detach())
    check(local, "")
    check(saved, buffer)
    check(model(False), frozen)
    if trainable is not None:
        check(model(True), trainable)


def test_two_parameters_in_one_memory_are_refused_and_tied_ones_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are two tensors in one memory"):
        ModelParts(model)
    model[1].weight = model[0].weight
    assert ModelParts(model).space.names == ["0.weight", "0.bias", "1.bias"]


def test_memory_that_a_parameter_shares_in_part_is_refused() -> None:
    flat, model = torch.zeros(192), nn.Module()
    model.p, model.q = nn.Parameter(flat[:128]), nn.Parameter(flat[128:])
    model.register_buffer("one", torch.zeros(8))
    model.register_buffer("same", model.one)
    assert ModelParts(model).space.names == ["p", "q"]
    model.q = nn.Parameter(flat[64:])
    with pytest.raises(ConfigError, match="p and q are two tensors in one memory"):
        ModelParts(model)
    model.q = nn.Parameter(torch.zeros(9))
    model.register_buffer("b", flat[100:110])
    with pytest.raises(ConfigError, match="p and b are two tensors in one memory"):
        ModelParts(model)


def test_two_tensors_of_one_plain_name_are_refused() -> None:
    model = nn.Module()
    model.weight, model._orig_mod = nn.Parameter(torch.zeros(3)), nn.Module()
    model._orig_mod.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="two tensors named weight"):
        ModelParts(model)


def test_a_tensor_whose_values_are_in_others_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("two", TwoTensor(torch.zeros(3), torch.zeros(3)))
    with pytest.raises(ConfigError, match="buffer two is a TwoTensor, whose values are in other tensors"):
        ModelParts(model)


def test_buffers_that_no_joiner_would_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(8)
    sent = len(ModelParts(model).buffers())
    monkeypatch.setattr(model_tensors, "MAX_BUFFERS_BYTES", sent + 1000)
    ModelParts(model)
    monkeypatch.setattr(model_tensors, "MAX_BUFFERS_BYTES", sent - 1)
    with pytest.raises(ConfigError, match="persistent=False"):
        ModelParts(model)
