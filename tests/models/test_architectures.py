"""Architectures of transformers: two peers train each, from its configuration and without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from p2ptrain.training.models import build
from tests.models.architectures import CAUSAL, KINDS, TEXT, VOCABULARY, case_of
from tests.models.case import train_together

# rwkv looks for a compiler.
pytestmark = [pytest.mark.long, pytest.mark.processes]


@pytest.mark.parametrize("name", KINDS)
def test_peers_train_it(name: str, record_property: Callable[[str, object], None]) -> None:
    train_together(case_of(name), record_property)


@pytest.mark.parametrize("kind", CAUSAL)
def test_it_is_not_refused_as_one_that_is_not_causal(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, **{**TEXT, **CAUSAL[kind]}).save_pretrained(tmp_path)
    build(f"hf:{tmp_path}", vocab_size=VOCABULARY, seed=1)
