"""Architectures of transformers: two peers train each, from its configuration and without a download."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.models.architectures import KINDS, case_of
from tests.models.case import train_together

# rwkv looks for a compiler.
pytestmark = [pytest.mark.long, pytest.mark.processes]


@pytest.mark.parametrize("name", KINDS)
def test_peers_train_it(name: str, record_property: Callable[[str, object], None]) -> None:
    train_together(case_of(name), record_property)
