"""The rival: torch's DistributedDataParallel over gloo, with the model, inner optimizer and windows of the peers.

Each rank draws the windows that the peer of its number draws. Bytes are those on its TCP connections.
"""

from __future__ import annotations

import math
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import TrafficMeter
from benchmarks.processes import Workers, free_port
from benchmarks.shakespeare.cells import BATCH, CONTEXT, Cell
from benchmarks.shakespeare.data import ALPHABET, held_out_loss
from benchmarks.shakespeare.model import nanogpt_cpu
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import RandomWindows, load_corpus
from p2ptrain.training.data.tokenizer import Ids
from p2ptrain.training.inner_optimizer import InnerOptimizer, lr_share

# The windows that `p2ptrain join` evaluates this model on.
EVAL_WINDOWS = 64
# Longest time of a step on a machine with much else to do (guess).
START_TIMEOUT_S, STEP_TIMEOUT_S = 300.0, 10.0


def run(cell: Cell, data: Path, out: Path) -> dict[str, Any]:
    """Train a cell; `out` is not used. Raises WorkerError if a rank failed or hangs."""
    port = free_port()
    with Workers(_rank, [(port, rank, cell, data) for rank in range(cell.peers)]) as ranks:
        ranks.hear(START_TIMEOUT_S)
        meter = TrafficMeter(ranks.pids)
        began_s = time.perf_counter()
        ranks.tell("go")
        curves = ranks.hear(START_TIMEOUT_S + STEP_TIMEOUT_S * cell.steps)
        seconds = time.perf_counter() - began_s
        megabytes = meter.since_start().sent / 1e6 / cell.peers
        ranks.tell("evaluate")
        losses = ranks.hear(START_TIMEOUT_S)
        ranks.tell("stop")
    return {
        "tokens": cell.peers * cell.steps * BATCH * CONTEXT,
        "mb_per_peer": round(megabytes, 3),
        "seconds": round(seconds, 1),
        # The first rank's, whose weights all have. Bytes are the same at every step.
        "curve": [
            [step, round(loss, 4), round(at_s, 1), round(megabytes * step / cell.steps, 4)]
            for step, loss, at_s in curves[0]
        ],
        "loss": round(losses[0], 4),
        "losses": [round(loss, 4) for loss in losses],
    }


def _rank(pipe: Connection, port: int, rank: int, cell: Cell, data: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=cell.peers)
    torch.manual_seed(cell.seed)
    model = nanogpt_cpu(ALPHABET)
    config = RunConfig.from_dict(cell.settings)
    parallel = DistributedDataParallel(model)
    optimizer = InnerOptimizer(model, config)
    corpus = load_corpus(str(data), Ids(ALPHABET))
    windows = RandomWindows(corpus.training, context=CONTEXT, batch_size=BATCH, seed=1000 * cell.seed + rank + 1)
    dist.barrier()
    pipe.send("ready")
    pipe.recv()
    began_s = time.perf_counter()
    curve = [(0, held_out_loss(model, data, EVAL_WINDOWS), 0.0)]
    for step in range(cell.steps):
        _step(parallel, optimizer, windows, config, step)
        if (step + 1) % cell.eval_every == 0:
            # On every rank, as each peer evaluates itself.
            curve.append((step + 1, held_out_loss(model, data, EVAL_WINDOWS), time.perf_counter() - began_s))
    pipe.send(curve)
    pipe.recv()
    pipe.send(held_out_loss(model, data))
    pipe.recv()
    dist.destroy_process_group()


def _step(
    model: nn.Module, optimizer: InnerOptimizer, windows: RandomWindows, config: RunConfig, step: int
) -> None:  # fmt: skip
    model.train()
    inputs, targets = windows.next_batch()
    functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
    optimizer.step(lr_share(config, step))
    optimizer.zero_grad()
