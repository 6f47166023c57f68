"""Rival: torch's gloo all-reduce of the same model between the same machines, without matchmaking or membership."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.namespaces import Machine, enter
from benchmarks.processes import Workers
from benchmarks.shapes import gpt_25m

PORT = 29500
TIMEOUT_S = 180.0


def measure(machines: Sequence[Machine], dtype: torch.dtype, *, rounds: int) -> list[float]:
    """Seconds of each all-reduce of 25M values, on the slowest machine, after one that is not counted."""
    first = machines[0].address
    with Workers(_rank, [(m.pid, first, rank, len(machines), dtype) for rank, m in enumerate(machines)]) as ranks:
        ranks.hear(TIMEOUT_S)
        seconds = []
        for _ in range(rounds + 1):
            ranks.tell("round")
            seconds.append(max(ranks.hear(TIMEOUT_S)))
        return seconds[1:]


def _rank(pipe: Connection, namespace: int, first: str, rank: int, ranks: int, dtype: torch.dtype) -> None:
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    values = torch.randn(sum(parameter.numel() for parameter in gpt_25m().parameters())).to(dtype)
    dist.init_process_group("gloo", init_method=f"tcp://{first}:{PORT}", rank=rank, world_size=ranks)
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        dist.barrier()
        started_s = time.monotonic()
        dist.all_reduce(values)
        pipe.send(time.monotonic() - started_s)
        values /= ranks
