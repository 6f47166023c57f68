"""One model in all ranks of a peer: whole in each, with averaged gradients (DDP), or sharded over them (FSDP2).

A model that is sharded over the ranks (`--fsdp on`): each rank holds some rows of each parameter, of its gradient and
of its optimizer's state. Checkpoints hold whole tensors, the same as those of one process, so a peer may continue with
any number of processes, sharded or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2ptrain.algorithms.row_shards import row_range
from p2ptrain.errors import ConfigError
from p2ptrain.peer.sharding import fsdp_modules, is_sharded, local_of
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.training.models import GPT, Llama
from p2ptrain.training.ranks import STEP_TIMEOUT, Ranks


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """All ranks: return the module to call instead of `model` in training; it has the same parameters.

    Weights that are not sharded become those of rank 0. Optimizer, checkpoints, exchange and evaluation use `model`.
    """
    if ranks.size == 1 or fsdp_modules(model):
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


def check_fsdp(config: PeerConfig, num_ranks: int) -> None:
    """Raise ConfigError if a model cannot be sharded with these settings."""
    if config.fsdp == "off":
        return
    if num_ranks == 1:
        raise ConfigError("--fsdp on: needs several processes; start them with torchrun, or leave it out")
    if config.compile == "on":
        raise ConfigError("--fsdp on: does not go together with --compile on; leave one of them out")


def shard(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """All ranks: shard a model on the CPU in place, with the weights of rank 0. Its parts are then on the device.

    One block after the other is moved, so that a device never holds the whole model.
    """
    from torch.distributed.device_mesh import DeviceMesh  # these take a second
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        ranks.copy(tensor)
    mesh = DeviceMesh.from_group(dist.new_group(timeout=STEP_TIMEOUT), device.type)
    names = {module: name for name, module in model.named_modules()}
    # Blocks first, as fully_shard requires. The rest of the model also drops its whole parameters after a forward pass;
    # by default FSDP2 would keep them.
    for module in dict.fromkeys([*_blocks(model), model]):
        try:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        except ValueError as error:
            name = f"module {names[module]}" if names[module] else "the model"
            fault = ConfigError(f"--fsdp on: {name} cannot be sharded: {error} Change it, or leave the flag out")
            raise ranks.once(fault) from error


def _blocks(module: nn.Module, *, in_list: bool = False) -> Iterator[nn.Module]:
    """The modules that FSDP2 gathers one by one: those in the outermost lists of a model, or in lists within these.

    FSDP2 gathers a module when it is called, so a module without a `forward`, such as a list, cannot be one of them.
    """
    in_list = in_list or isinstance(module, nn.ModuleList)
    for child in module.children():
        if in_list and type(child).forward is not nn.Module.forward:
            yield child
        else:
            yield from _blocks(child, in_list=in_list)


def whole(state: Any, ranks: Ranks) -> Any:
    """All ranks: replace each sharded tensor of a state by the whole one, in host memory; on other ranks than 0 empty.

    Only one tensor at a time is whole on a device.
    """
    if isinstance(state, Mapping):
        return {name: whole(part, ranks) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(part, ranks) for part in state)
    if not isinstance(state, torch.Tensor) or not is_sharded(state):
        return state
    sharded: Any = state
    with torch.no_grad():
        full = sharded.full_tensor()
    return full.cpu() if ranks.is_first else torch.empty(0)


def own_part(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The part of an optimizer's state with whole tensors that this rank holds, for its `load_state_dict`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {}
    for number, values in state["state"].items():
        own[number] = {name: _like(parameters[number], value) for name, value in values.items()}
    return {**state, "state": own}


def own_values(parameter: nn.Parameter, inside: Any, ranks: Ranks) -> list[float]:
    """The values of a flattened parameter at the places `inside`, with zeros for those that other ranks hold."""
    rows = parameter.shape[0]
    start, stop = (row * (parameter.numel() // rows) for row in row_range(rows, ranks.rank, ranks.size))
    local = local_of(parameter).reshape(-1)
    return [float(local[place - start]) if start <= place < stop else 0.0 for place in inside.tolist()]


def _like(parameter: nn.Parameter, value: Any) -> Any:
    """A copy of a tensor, sharded as the parameter is if it has its shape; anything else as it is.

    A tensor for another device is copied by the optimizer. One of a checkpoint is a map of its file, which would stay
    on the disk after it is removed.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not is_sharded(parameter) or value.shape != parameter.shape:
        return value.clone() if value.device == parameter.device else value
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    mesh = sharded.device_mesh
    start, stop = row_range(len(value), mesh.get_local_rank(), mesh.size())
    local = value[start:stop].to(parameter.device, copy=True).contiguous()
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=shape, stride=stride)
