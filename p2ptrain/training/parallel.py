"""Training one model in all ranks of a peer: DistributedDataParallel averages their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2ptrain.training.fsdp import is_fsdp
from p2ptrain.training.ranks import STEP_TIMEOUT, Ranks


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """What to call instead of `model` in training. All ranks: the weights become those of rank 0, unless they are
    sharded.

    Everything else (optimizer, checkpoints, exchange, evaluation) goes on to use `model`, whose parameters are shared.
    """
    if ranks.size == 1 or is_fsdp(model):
        return model
    group = dist.new_group(timeout=STEP_TIMEOUT)
    # Buffers are each rank's own, as they are each peer's own. In language models they are constants. The argument has
    # another name since torch 2.13.
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    own_buffers: Any = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    return DistributedDataParallel(model, process_group=group, **own_buffers)


def without_averaging(wrapped: nn.Module) -> AbstractContextManager[object]:
    """Within it, the gradients of a backward pass are added up and not yet averaged over the ranks."""
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def average_gradients(parameters: Iterable[nn.Parameter], wrapped: nn.Module) -> None:
    """Average the gradients over the ranks, after a step whose every backward pass was `without_averaging`."""
    if isinstance(wrapped, DistributedDataParallel):
        for parameter in parameters:
            if parameter.grad is not None:
                # Divided first, as DistributedDataParallel does, so that the sum is the same to the bit.
                parameter.grad /= dist.get_world_size(wrapped.process_group)
                dist.all_reduce(parameter.grad, group=wrapped.process_group)
