"""Ten kinds of models that users come with: two peers train each. `make models` does this for all others, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.models.case import train_together

Tell = Callable[[str, object], None]


@pytest.mark.slow  # to import what torch's own tests use
@pytest.mark.parametrize(
    "name", ["nn.Linear", "nn.Conv2d", "nn.BatchNorm2d", "nn.LSTM", "nn.Embedding", "nn.TransformerEncoderLayer"]
)
def test_peers_train_a_module_of_torch(name: str, record_property: Tell) -> None:
    from tests.models.torch_modules import case_of

    train_together(case_of(name), record_property)


@pytest.mark.slow  # to import transformers
@pytest.mark.parametrize("name", ["transformers gpt2", "transformers llama", "transformers vit"])
def test_peers_train_an_architecture(name: str, record_property: Tell) -> None:
    """gpt2 ties its weights."""
    from tests.models.architectures import case_of

    train_together(case_of(name), record_property)


@pytest.mark.slow  # to import peft
def test_peers_train_an_adapter(record_property: Tell) -> None:
    from tests.models.adapters import case_of

    pair = train_together(case_of("LoRA"), record_property)
    names = list(pair.peers[0].anchor_state_dict())
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names), names
