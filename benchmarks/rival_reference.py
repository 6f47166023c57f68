"""Rival: SPARTA with DiLoCo as in exo gym, the simulator of SPARTA's authors, reimplemented in plain torch over gloo.

k processes in lockstep. After every inner step they do the sparse average of `rival_exogym`. After every H-th step they
also do DiLoCo: they average the whole models, and rank 0 takes torch's Nesterov step (0.7, 0.9) on its master copy and
broadcasts it. One difference from exo gym makes both sides comparable: the run ends with a plain average, as in
p2ptrain, because Nesterov overshoots after few rounds.

A barrier precedes each exchange, and its time is measured from there. So it contains neither computation nor the wait
for a slower process, which favours the rival.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.demo_training import Trained, Training, held_out_loss
from benchmarks.measure import TrafficMeter
from benchmarks.processes import Workers, free_port
from benchmarks.rival_exogym import exchange
from benchmarks.swarm import Setup

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
# Longest time of a step, of the demo model or of 25M parameters, on a busy machine (guess).
STEP_TIMEOUT_S = 5.0


def train(training: Training) -> Trained:
    """Train the demo model. Raises WorkerError if a process failed or was too slow."""
    port = free_port()
    with Workers(_trainer, [(rank, port, training) for rank in range(training.peers)]) as nodes:
        nodes.hear(timeout_s=60.0)
        meter = TrafficMeter(nodes.pids)
        started = time.perf_counter()
        nodes.tell("go")
        outcomes: list[tuple[float, list[float]]] = nodes.hear(timeout_s=60.0 + STEP_TIMEOUT_S * training.steps)
        wall_s = time.perf_counter() - started
        sent = meter.since_start().sent
        nodes.tell("stop")
    return Trained(
        loss=outcomes[0][0],
        held_s=[seconds for _, held_s in outcomes for seconds in held_s],
        sent_bytes=sent / training.peers / training.steps,
        wall_s=wall_s,
    )


def hold(setup: Setup, *, peers: int, steps: int) -> list[float]:
    """Seconds that each exchange blocked the workload, for all steps of all processes, without two warm-up steps.

    Raises:
        WorkerError: a process failed or was too slow.
    """
    port = free_port()
    with Workers(_worker, [(rank, port, setup, peers, steps) for rank in range(peers)]) as nodes:
        held_s: list[list[float]] = nodes.hear(timeout_s=60.0 + STEP_TIMEOUT_S * steps)
    return [seconds for node in held_s for seconds in node]


class Exchange:
    """One process's side of the algorithm.

    Args:
        model: model of this process, equal on all at the start; changed in place by `after`.
        rank: which process this is.
        peers: k.
        fragment_fraction: p.
        sync_every: H.
    """

    def __init__(self, model: nn.Module, rank: int, peers: int, fragment_fraction: float, sync_every: int) -> None:
        self._model = model
        self._rank = rank
        self._peers = peers
        self._fragment_fraction = fragment_fraction
        self._sync_every = sync_every
        self._master = copy.deepcopy(model)
        self._outer = torch.optim.SGD(self._master.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)

    def after(self, step: int, *, last: bool = False) -> float:
        """Exchange after inner step `step`, counted from 1. Returns the seconds since all processes were ready."""
        dist.barrier()
        started = time.perf_counter()
        exchange(self._model, self._fragment_fraction, self._rank, self._peers)
        if last or step % self._sync_every == 0:
            self._average()
            if not last:
                self._outer_step()
        return time.perf_counter() - started

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self._model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(self._peers)

    @torch.no_grad()
    def _outer_step(self) -> None:
        pairs = list(zip(self._master.parameters(), self._model.parameters(), strict=True))
        if self._rank == 0:
            for master, mean in pairs:
                master.grad = master - mean
            self._outer.step()
            for master, mean in pairs:
                mean.copy_(master)
        for _, parameter in pairs:
            dist.broadcast(parameter, src=0)


def _trainer(pipe: Connection, rank: int, port: int, training: Training) -> None:
    model = training.model()
    trainer = training.trainer(model, rank)
    _meet(port, rank, training.peers)
    ours = Exchange(model, rank, training.peers, training.fragment_fraction, training.sync_every)
    pipe.send("ready")
    pipe.recv()
    held_s = _run(ours, lambda step: trainer.step(step - 1), training.steps)
    pipe.send((held_out_loss(model), held_s))
    pipe.recv()
    dist.destroy_process_group()


def _worker(pipe: Connection, rank: int, port: int, setup: Setup, peers: int, steps: int) -> None:
    model = setup.model()
    work = setup.work(model)
    _meet(port, rank, peers)
    ours = Exchange(model, rank, peers, setup.fragment_fraction, setup.sync_every)
    _run(ours, lambda step: work(), 2)
    pipe.send(_run(ours, lambda step: work(), steps))
    dist.destroy_process_group()


def _meet(port: int, rank: int, peers: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=peers)
    dist.barrier()


def _run(node: Exchange, work: Callable[[int], object], steps: int) -> list[float]:
    held_s = []
    for step in range(1, steps + 1):
        work(step)
        held_s.append(node.after(step, last=step == steps))
    return held_s
