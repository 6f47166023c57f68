"""The loss that several benchmarks report: of a model, on fixed windows of held-out text."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.training.data import Tokens, fixed_windows
from p2ptrain.training.models import context_length


@torch.no_grad()
def mean_loss(model: nn.Module, held_out: Tokens, *, windows: int, batch: int) -> float:
    """Mean loss in nats on `windows` windows of the model's context, `batch` at a time; fewer if the text is short.

    Leaves the model in evaluation mode.
    """
    model.eval()
    inputs, targets = fixed_windows(held_out, context=context_length(model), count=windows)
    losses = [
        functional.cross_entropy(model(some).flatten(0, 1), wanted.flatten(), reduction="sum").item()
        for some, wanted in zip(torch.split(inputs, batch), torch.split(targets, batch), strict=True)
    ]
    return sum(losses) / targets.numel()
