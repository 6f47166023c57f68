"""MFU: nanoGPT's count, known devices only, and nothing where it is not known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2ptrain.training.mfu import flops_per_token, peak_flops, utilisation_of
from p2ptrain.training.models import GPT, PRESETS, GPTConfig, Llama, LlamaConfig


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM2e", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_devices_are_known_by_the_names_that_torch_gives(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Tesla V100-SXM2-16GB", "Quadro RTX 4000", "",
    ],
)  # fmt: skip
def test_others_are_not_guessed(name: str) -> None:
    assert peak_flops(name) is None


def test_a_token_costs_what_nanogpt_counts() -> None:
    shape = PRESETS["gpt2-124m"]
    assert isinstance(shape, GPTConfig)
    with torch.device("meta"):
        model = GPT(shape)
    # nanoGPT, model.py, estimate_mfu: N without position embeddings, and 12 · layers · heads · head size · context.
    assert flops_per_token(model) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_only_looked_up_does_not_count(tied: bool) -> None:
    shape = LlamaConfig(vocab_size=100, layers=2, heads=2, width=16, hidden=40, context=32, tied=tied)
    blocks = shape.num_parameters - (1 if tied else 2) * 1600
    assert flops_per_token(Llama(shape)) == 6 * (blocks + 1600) + 12 * 2 * 16 * 32


def test_models_of_transformers_count_as_ours() -> None:
    transformers = pytest.importorskip("transformers")
    from p2ptrain.training.models.hf import CausalLM

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=100)
    theirs = CausalLM(transformers.GPT2LMHeadModel(config), 32)
    ours = GPT(GPTConfig(vocab_size=100, layers=2, heads=2, width=16, context=32))
    # Theirs counts the position embeddings too.
    assert flops_per_token(theirs) == pytest.approx(flops_per_token(ours), rel=0.1)


def test_nothing_is_shown_for_other_models_and_on_a_cpu() -> None:
    assert flops_per_token(nn.Linear(3, 3)) is None
    ours = GPT(GPTConfig(vocab_size=100, layers=1, heads=1, width=8, context=8))
    assert utilisation_of(ours, torch.device("cpu")) is None


def test_the_share_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GPT(GPTConfig(vocab_size=100, layers=1, heads=1, width=8, context=8))
    flops = flops_per_token(ours)
    assert flops is not None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert utilisation_of(ours, torch.device("cuda")) == flops / 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Something new")
    assert utilisation_of(ours, torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert utilisation_of(nn.Linear(3, 3), torch.device("cuda")) is None
