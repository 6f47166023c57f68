"""Adapters of peft: two peers train each, and only the adapter is exchanged; one that comes after `join` is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import peft
import pytest
import torch

from p2ptrain.errors import ConfigError
from tests.models.adapters import ADAPTERS, base, case_of
from tests.models.case import train_together
from tests.peer.pair import Pair

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ADAPTERS)
def test_peers_train_it_alone(name: str, record_property: Callable[[str, object], None]) -> None:
    pair = train_together(case_of(name), record_property)
    of_base = {own for own, _ in base().named_parameters()}
    names = [own.removeprefix("base_model.model.") for own in pair.peers[0].anchor_state_dict()]
    assert names
    assert of_base.isdisjoint(own.replace(".base_layer", "") for own in names)


def test_an_adapter_that_is_added_after_join_is_refused_at_the_next_step() -> None:
    model = base()
    with Pair(model) as pair:
        pair.peers[0].step()
        before = copy.deepcopy(model.state_dict())
        adapted = peft.get_peft_model(model, ADAPTERS["LoRA"]())
        added = sum(parameter.requires_grad for parameter in adapted.parameters())
        refused = (
            f"{added} parameters of the model, such as model.layers.0.self_attn.q_proj.lora_A.default.weight, became "
            "trainable after it had joined the run (in a new layer or adapter, or by unfreezing), and are not exchanged"
        )
        with pytest.raises(ConfigError, match=re.escape(refused)):
            pair.peers[0].step()
    now = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(value, now[name]) for name, value in before.items())
