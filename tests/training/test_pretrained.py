"""Initial weights from a file: all are loaded if they fit; else the error names a tensor, and nothing is changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.training import checkpoint
from p2ptrain.training.data.tokenizer import IDS
from p2ptrain.training.pretrained import check_weights, load_weights, read_weights


class Model(nn.Module):
    """Two matrices and a buffer; the second matrix has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.tied = self.second
        self.register_buffer("count", torch.tensor(0))


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_weights_come_from_a_file_a_checkpoint_and_a_directory_of_them(tmp_path: Path) -> None:
    weights = _weights(Model())
    save_file(weights, tmp_path / "weights.safetensors")
    older = checkpoint.save(tmp_path / "out", checkpoint.Checkpoint(3, {}, {"model": {"w": torch.ones(1)}, "peer": {}}))
    newest = checkpoint.save(tmp_path / "out", checkpoint.Checkpoint(4, {}, {"model": weights, "peer": {}}))
    for place in (tmp_path / "weights.safetensors", newest, tmp_path / "out"):
        check_weights(place)
        assert _equal(read_weights(place, IDS), weights)
    assert read_weights(older, IDS).keys() == {"w"}


def test_parameters_and_buffers_are_taken_over() -> None:
    model, other = Model(), Model()
    other.count.fill_(7)
    tensors = {id(parameter) for parameter in model.parameters()}
    load_weights(model, _weights(other), origin="here")
    assert _equal(_weights(model), _weights(other))
    # In place: an optimizer created before keeps working.
    assert {id(parameter) for parameter in model.parameters()} == tensors


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel])
@pytest.mark.parametrize("of_file", [True, False])
def test_wrappers_of_torch_are_looked_through(wrap, of_file: bool) -> None:
    model, other = Model(), Model()
    file, target = (wrap(other), model) if of_file else (other, wrap(model))
    load_weights(target, _weights(file), origin="here")
    assert _equal(_weights(model), _weights(other))


def test_types_are_converted_and_one_name_of_tied_tensors_is_enough() -> None:
    model, other = Model(), Model()
    half = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in _weights(other).items()
    }
    del half["second.weight"]
    load_weights(model, half, origin="here")
    assert model.second.weight.dtype == torch.float32
    assert torch.equal(model.second.weight, half["tied.weight"].float())
    assert torch.equal(model.first.weight, other.first.weight.bfloat16().float())


def _without(*names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in _weights(Model()).items() if name not in names}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            _without("first.weight", "first.bias"),
            r"--init-from here: first.weight is missing \(2 of 5 of the model's tensors are\); give weights of this",
        ),
        (_without("second.weight", "tied.weight"), r"second.weight is missing \(2 of 5"),
        ({**_without(), "h.0": torch.ones(1)}, r"h\.0 is not in the model \(1 of 6 of the file's tensors are not\)"),
        (
            {**_without(), "first.weight": torch.ones(4, 5), "first.bias": torch.ones(9)},
            r"first.weight has shape \(4, 5\), in the model \(4, 3\) \(2 of 5 of the file's tensors differ\); give wei",
        ),
        (
            {**_without(), "first.bias": torch.tensor([1.0, float("nan"), 1.0, 1.0])},
            r"first.bias has values that are not finite \(1 of 5",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_nothing_changed(weights: dict[str, torch.Tensor], message: str) -> None:
    model = Model()
    before = _weights(model)
    with pytest.raises(ConfigError, match=message):
        load_weights(model, weights, origin="here")
    assert _equal(_weights(model), before)


def test_frozen_parameters_must_be_those_that_others_build() -> None:
    model = Model()
    model.first.requires_grad_(False)
    weights = _weights(model)
    weights["second.weight"] = weights["tied.weight"] = torch.ones(4, 4)
    load_weights(model, weights, origin="here")
    assert torch.equal(model.second.weight, torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"first\.weight is frozen .* load it in the model's factory"):
        load_weights(model, {**weights, "first.weight": torch.ones(4, 3)}, origin="here")


def test_what_is_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no weights", encoding="utf-8")
    for name, message in {
        "empty": r"--init-from .*empty: no checkpoint in this directory; give one, the --out directory",
        "none.safetensors": r"none\.safetensors: cannot be read \(No such file or directory\); give",
        "text": r"text: is not a complete safetensors file \(.*\); write one with",
    }.items():
        for look in (check_weights, partial(read_weights, tokenizer=IDS)):
            with pytest.raises(ConfigError, match=message):
                look(tmp_path / name)


def test_weights_that_were_trained_with_another_tokenizer_are_refused(tmp_path: Path) -> None:
    weights = _weights(Model())
    saved = {name: {"run": {"tokenizer": name}} for name in ("chars", IDS)}
    paths = {
        name: checkpoint.save(tmp_path / name, checkpoint.Checkpoint(1, info, {"model": weights, "peer": {}}))
        for name, info in saved.items()
    }
    with pytest.raises(ConfigError, match=r"chars.*: its weights were trained with another tokenizer than this run's"):
        read_weights(paths["chars"], "bytes")
    for name, tokenizer in (("chars", "chars"), ("chars", IDS), (IDS, "bytes")):
        assert _equal(read_weights(paths[name], tokenizer), weights)


def test_a_damaged_checkpoint_and_a_cut_file_are_refused(tmp_path: Path) -> None:
    weights = _weights(Model())
    file = tmp_path / "weights.safetensors"
    save_file(weights, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"is not a complete safetensors file"):
        check_weights(file)
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint(4, {}, {"model": weights}))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged.*give another checkpoint"):
        read_weights(path, IDS)


def test_a_module_of_ones_own_may_be_called_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.module = nn.Linear(2, 2)

    model, other = Own(), Own()
    load_weights(model, _weights(torch.compile(other, backend="eager")), origin="here")
    assert _equal(_weights(model), _weights(other))
    plain = nn.Linear(2, 2)
    twice = {**_weights(plain), "module.weight": torch.ones(2, 2)}
    with pytest.raises(ConfigError, match=r"module\.weight is not in the model"):
        load_weights(plain, twice, origin="here")
