"""Reads from torchrun's variables which of the processes of one peer this is. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Which of the processes of one peer this is.

    Attributes:
        rank: its number; rank 0 is on the network and prints.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1


ONE_PROCESS = Launch()


def rank_of(environ: Mapping[str, str]) -> int:
    """The number of this process among those that torchrun started; 0 if it did not start this one."""
    # Other programs set RANK and WORLD_SIZE too; this variable is torchrun's alone.
    return int(environ["RANK"]) if "TORCHELASTIC_RUN_ID" in environ else 0


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Read torchrun's variables; one process if torchrun did not start this one.

    Raises ConfigError if torchrun started processes on several machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ONE_PROCESS
    size, here = (int(environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != size:
        raise ConfigError(
            f"torchrun: {size} processes, and {here} of them on this machine; start torchrun --nproc-per-node on each "
            f"machine by itself, without --nnodes: each machine is a peer"
        )
    return Launch(rank_of(environ), size)
