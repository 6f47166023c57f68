"""Rival: one SPARTA exchange as in exo gym, reimplemented in plain torch over gloo.

At every step and for every parameter, a Bernoulli mask of the parameter's full size is drawn and broadcast; the values
that it selects are summed over all nodes, divided and written back. Training waits for all of it. In exo gym every node
draws a mask and that of rank 0 is used; here only rank 0 draws, which is faster.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.processes import Workers, free_port
from benchmarks.shapes import gpt2_124m


def measure(*, fragment_fraction: float, peers: int = 2, steps: int = 12) -> list[float]:
    """Seconds per exchange at 124M parameters, as seen by rank 0; two warm-up steps are left out.

    Raises:
        WorkerError: a process failed or was too slow.
    """
    port = free_port()
    arguments = [(rank, peers, port, fragment_fraction, steps) for rank in range(peers)]
    with Workers(_node, arguments) as nodes:
        seconds: list[float] = nodes.hear(timeout_s=60.0 + 10.0 * steps)[0]
    return seconds


def _node(pipe: Connection, rank: int, peers: int, port: int, fragment_fraction: float, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=peers)
    model = gpt2_124m(seed=rank)
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        started = time.perf_counter()
        exchange(model, fragment_fraction, rank, peers)
        seconds.append(time.perf_counter() - started)
    pipe.send(seconds[2:])
    dist.destroy_process_group()


@torch.no_grad()
def exchange(model: nn.Module, fragment_fraction: float, rank: int, peers: int) -> None:
    """Average a random `fragment_fraction` of the model's values, in place, over all processes of the group."""
    for parameter in model.parameters():
        if rank == 0:
            mask = torch.bernoulli(torch.full(parameter.shape, fragment_fraction)).bool()
        else:
            mask = torch.empty(parameter.shape, dtype=torch.bool)
        dist.broadcast(mask, src=0)
        shared = parameter[mask]
        dist.all_reduce(shared)
        parameter.masked_scatter_(mask, shared / peers)
