"""Every module of torch, as torch's own tests make it: `module_db`, with its inputs.

One model has all variants of a module that its tests have: with and without bias, of several shapes, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, module_db
from torch.utils._pytree import tree_leaves

from tests.models.case import Case

INFOS: dict[str, ModuleInfo] = {info.name: info for info in module_db}


class Variants(nn.Module):
    """The variants of one module that have parameters."""

    def __init__(self, info: ModuleInfo) -> None:
        super().__init__()
        self._info = info
        self.variants = nn.ModuleList(module for module, _ in self._made())
        if info.is_lazy:
            self()  # gives the parameters their shapes

    def forward(self) -> torch.Tensor:
        """Call each with a new input of its own, and return a loss of all outputs."""
        inputs = [given for _, given in self._made()]
        outputs = [
            leaf
            for variant, given in zip(self.variants, inputs, strict=True)
            for leaf in tree_leaves(variant(*given.args, **given.kwargs))
            if torch.is_tensor(leaf) and leaf.requires_grad and leaf.numel()
        ]
        # Not a plain sum, whose gradient is zero after a softmax or a normalization.
        return torch.stack([(output.abs() - 1).square().mean() for output in outputs]).mean()

    def _made(self) -> Iterator[tuple[nn.Module, FunctionInput]]:
        for module, given in variants_of(self._info):
            if has_parameters(module):
                yield module, given


def has_parameters(module: nn.Module) -> bool:
    """Whether it has any."""
    return next(module.parameters(), None) is not None


def variants_of(info: ModuleInfo) -> Iterator[tuple[nn.Module, FunctionInput]]:
    """Make each variant of a module that torch's tests have, with an input of it."""
    inputs: Callable[..., Any] = info.module_inputs_func
    for sample in inputs(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True):
        if sample.forward_input is not None:
            made = sample.constructor_input
            yield info.module_cls(*made.args, **made.kwargs).to(torch.float32), sample.forward_input


def case_of(name: str) -> Case:
    """The case of a module in `INFOS` that has parameters."""
    return Case(name, lambda: Variants(INFOS[name]), lambda model: model())
