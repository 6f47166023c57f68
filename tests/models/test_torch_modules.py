"""Every module of torch, with all variants and inputs of its own tests: two peers train it, or `join` refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models.case import NOTHING_TO_TRAIN, line, refuse, train_together
from tests.models.torch_modules import INFOS, case_of, has_parameters, variants_of

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::UserWarning:torch")]

NO_SHAPE = "parameter weight has no shape yet: run the model once before joining"


@pytest.mark.parametrize("name", INFOS)
def test_peers_train_it_or_join_refuses_it(name: str, record_property: Callable[[str, object], None]) -> None:
    """Refused are variants without parameters, and lazy ones that were not run; the model run once is trained."""
    torch.manual_seed(0)
    info = INFOS[name]
    variants = [module for module, _ in variants_of(info)]
    assert variants, "torch has no inputs for it"
    for module in variants:
        if not has_parameters(module):
            refuse(name, module, NOTHING_TO_TRAIN)
        elif info.is_lazy:
            refuse(name, module, NO_SHAPE)
    if any(map(has_parameters, variants)):
        train_together(case_of(name), record_property)
    else:
        record_property("shown", line(name, 0, f"refused: {NOTHING_TO_TRAIN}"))
