"""Training one model in all ranks of a peer: DistributedDataParallel averages their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2ptrain.training.fsdp import is_fsdp
from p2ptrain.training.models import GPT, Llama
from p2ptrain.training.ranks import STEP_TIMEOUT, Ranks


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """All ranks: return the module to call instead of `model` in training; it has the same parameters.

    Weights that are not sharded become those of rank 0. Optimizer, checkpoints, exchange and evaluation use `model`.
    """
    if ranks.size == 1 or is_fsdp(model):
        return model
    group = dist.new_group(timeout=STEP_TIMEOUT)
    # Buffers are each rank's own, as they are each peer's own. In language models they are constants. The argument has
    # another name since torch 2.13.
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    own_buffers: Any = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    # Other models may leave parameters out, and each rank may leave out others. Then torch looks for them in each step,
    # which costs too little to measure on a CPU, and warns once if there are none.
    uses_all = type(model) in (GPT, Llama)
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=not uses_all, **own_buffers)


def without_averaging(wrapped: nn.Module) -> AbstractContextManager[object]:
    """Within this context, backward passes add up gradients without averaging them over the ranks."""
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def average_gradients(parameters: Iterable[nn.Parameter], wrapped: nn.Module) -> None:
    """Average the gradients over the ranks, after a step whose every backward pass was `without_averaging`.

    A parameter that one rank has not used counts as zeros there. One that no rank has used goes on without a gradient.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    group = wrapped.process_group
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    uses = torch.tensor([int(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    dist.all_reduce(uses, group=group)
    for parameter, count in zip(trained, uses.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Divided first, as DistributedDataParallel does, so that the sum is the same to the bit.
            parameter.grad /= dist.get_world_size(group)
            dist.all_reduce(parameter.grad, group=group)
