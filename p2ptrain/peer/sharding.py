"""Parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) has split over the ranks of a process group.

Each is a DTensor, of which a rank holds some rows. The module of DTensor takes a second to import. A program that uses
it has imported it, so it is not imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from p2ptrain.algorithms.row_shards import row_range
from p2ptrain.errors import ConfigError
from p2ptrain.peer.process_group import ProcessGroup


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values that this rank holds, in their own storage: a tensor, or the local part of a DTensor."""
    with torch.no_grad():
        values: Any = tensor.data
        local: torch.Tensor = values.to_local() if is_sharded(tensor) else values
        return local


def fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def check_sharding(model: torch.nn.Module, ranks: ProcessGroup | None) -> None:
    """Raise ConfigError if a model is sharded in a way that is not supported. Call it after `reshard` of its modules.

    Supported is what `fully_shard` does by default: all trainable parameters, on their first dimension, over all ranks
    of the process group.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("model is a FullyShardedDataParallel (FSDP1): use torch.distributed.fsdp.fully_shard instead")
    parameters = dict(model.named_parameters())
    sharded: dict[str, Any] = {name: parameter for name, parameter in parameters.items() if is_sharded(parameter)}
    for name, parameter in sharded.items():
        if ranks is None:
            raise ConfigError(f"parameter {name} is sharded: give process_group=, with the processes that hold it")
        placements = parameter.placements
        if parameter.device_mesh.ndim != 1 or not placements[0].is_shard(0):
            raise ConfigError(
                f"parameter {name} is placed as {placements}: only (Shard(dim=0),) is supported, as fully_shard(model) "
                "does; hybrid sharding (HSDP), tensor parallel and shard_placement_fn= are not"
            )
        own, theirs = ranks.members, dist.get_process_group_ranks(parameter.device_mesh.get_group())
        if own != theirs:
            raise ConfigError(
                f"parameter {name} is sharded over the processes {theirs}, and process_group= has {own}: must be the "
                "same, in this order"
            )
        local = local_of(parameter)
        start, stop = row_range(parameter.shape[0], ranks.rank, ranks.size)
        if len(local) != stop - start or not local.is_contiguous():
            raise ConfigError(
                f"parameter {name}: rank {ranks.rank} holds {len(local)} of {parameter.shape[0]} rows; must be "
                f"{stop - start}, contiguous, as fully_shard(model) splits them"
            )
    if sharded:
        for name, parameter in parameters.items():
            if parameter.requires_grad and name not in sharded:
                raise ConfigError(f"parameter {name} is not sharded, but others are: call fully_shard(model) on all")


def frozen_values(parameter: torch.Tensor, ranks: ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Yield the bytes of a parameter in parts. All ranks, if it is sharded: then rank 0 gets all, others no more."""
    local = local_of(parameter)
    own = local.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if ranks is None or not is_sharded(parameter) or ranks.rank == 0:
        yield own
    elif len(own):
        ranks.send(own, 0)
    if ranks is not None and is_sharded(parameter) and ranks.rank == 0:
        for rank in range(1, ranks.size):
            start, stop = row_range(parameter.shape[0], rank, ranks.size)
            part = torch.empty((stop - start) * local[:1].nbytes, dtype=torch.uint8, device="cpu")
            if len(part):
                ranks.receive(part, rank)
                yield part
