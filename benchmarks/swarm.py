"""p2ptrain's side of a benchmark: real peers as processes, which run the phases of a benchmark together.

A peer runs a workload and `peer.step()` in turns, as a training loop does; only `drift` changes the weights. The same
peers run all phases of a swarm, so that phases with and without an exchange can be compared.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

import p2ptrain
from benchmarks.measure import memory
from benchmarks.namespaces import Machine, enter
from benchmarks.processes import WorkerError, Workers

# Steps of the benchmarks take less than half of this, also on a busy machine (guess).
STEP_TIMEOUT_S = 1.0
# What a peer's state takes at 100 Mbit/s, and twice that on a busy machine (guess).
JOIN_S = 40.0
# Longer than any benchmark: no round becomes due.
NEVER = 10**9
# Message to the peers instead of a phase.
DRIFT = "drift"
# Some hundred inner steps change weights by about this much; their standard deviation is 0.02 (guess).
_DRIFT = 0.001
# How many steps before a round is due it is near.
_NEAR_STEPS = 10


@dataclass(frozen=True)
class Setup:
    """The settings of all peers of a swarm.

    Attributes:
        model: importable function that builds the model, equal in every process.
        work: takes the model and returns the function that is called in each step; see `workloads.py`.
        fragment_fraction: p; 0 for no gossip.
        sync_every: H, in inner steps.
        machines: where each peer runs; empty: all on this machine.
        gossip_budget: share of the CPU time that gossip may take; 1: a push at every step.
        round_steps: enough steps for a round to become due and land.
        prepare_s: how long building model and work may take.
        step_timeout_s: how long a step may take on average.
        own_core: each peer, with its p2pd, has one core and no other, as on a machine of its own. Linux only.
    """

    model: Callable[[], nn.Module]
    work: Callable[[nn.Module], Callable[[], None]]
    fragment_fraction: float = 0.0
    sync_every: int = NEVER
    machines: tuple[Machine, ...] = ()
    gossip_budget: float = 1.0
    round_steps: int = 600
    prepare_s: float = 60.0
    step_timeout_s: float = STEP_TIMEOUT_S
    own_core: bool = False


@dataclass(frozen=True)
class Phase:
    """A phase that all peers run.

    Attributes:
        steps: number of steps; the maximum with `until_round`.
        exchange: whether `peer.step()` is called.
        until_round: stop after the step in which a round landed.
    """

    steps: int
    exchange: bool = True
    until_round: bool = False


@dataclass(frozen=True)
class Step:
    """One step of one peer.

    Attributes:
        whole_s: seconds of the step, including the workload.
        exchange_s: seconds of `peer.step()`, measured by the caller.
        report: the result of `peer.step()`; None if it was not called.
        due: whether a round was due after it.
        left: steps that this peer then still has to make until one is due.
    """

    whole_s: float
    exchange_s: float
    report: p2ptrain.StepReport | None
    due: bool
    left: int


class Swarm:
    """Live peers that are connected to each other; a context manager.

    `memory_before_join` is the memory of each process after it has built model and workload.

    Args:
        setup: settings of all peers.
        peers: number of processes.
    """

    def __init__(self, setup: Setup, peers: int) -> None:
        self._peers = peers
        self._setup = setup
        self._workers = Workers(_peer, [(setup, index, peers) for index in range(peers)])

    def __enter__(self) -> Swarm:
        self._workers.__enter__()
        try:
            self._workers.hear(timeout_s=self._setup.prepare_s)
            self.memory_before_join = [memory(pid) for pid in self.pids]
            self._workers.tell_one(0, ())
            initial_peers = self._workers.hear_from(0, timeout_s=90.0)
            for index in range(1, self._peers):
                self._workers.tell_one(index, initial_peers)
            # On a slow line all joiners together may have one donor's.
            self._workers.hear(timeout_s=120.0 + JOIN_S * self._peers)
        except BaseException as error:
            self._workers.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, error, trace)

    @property
    def pids(self) -> list[int]:
        """Process ids of the peers; their p2pds are child processes."""
        return self._workers.pids

    def run(self, phase: Phase) -> list[list[Step]]:
        """Run a phase on all peers. Returns the steps of each. Raises WorkerError if a peer fails or is too slow."""
        self._workers.tell(phase)
        steps: list[list[Step]] = self._workers.hear(timeout_s=60.0 + phase.steps * self._setup.step_timeout_s)
        return steps

    def drift(self) -> None:
        """Change the weights differently on each peer, as training would."""
        self._workers.tell(DRIFT)
        self._workers.hear(timeout_s=60.0)

    def round(self) -> list[list[Step]] | None:
        """Run until a round has landed, and return the steps of each peer. Call `drift` before.

        Returns None if the round was not committed by all peers, as can happen to the first one.
        """
        peers = self.run(Phase(self._setup.round_steps, until_round=True))
        landed = [steps[-1].report.round for steps in peers if steps[-1].report]
        complete = all(
            report and report.status == "committed" and len(report.contributors) == self._peers for report in landed
        )
        return peers if complete else None

    def approach(self) -> None:
        """Run until a round is nearly due, so that what is measured from here on is the round.

        All make the same number of steps: who waited for others would seem slow, and get shorter intervals than they.
        """
        (*_, now), *others = self.run(Phase(1))
        left = min(now.left, *(steps[-1].left for steps in others))
        if left > _NEAR_STEPS:
            self.run(Phase(left - _NEAR_STEPS))

    def warm_up(self) -> None:
        """Run until every peer has merged a fragment. Raises WorkerError after 100 steps."""
        self.drift()
        for _ in range(10):
            peers = self.run(Phase(steps=10))
            if all(any(step.report and step.report.merged for step in steps) for steps in peers):
                return
        raise WorkerError("no fragments were merged in 100 steps")


def _peer(pipe: Connection, setup: Setup, index: int, peers: int) -> None:
    address = "127.0.0.1"
    if setup.machines:
        enter(setup.machines[index].pid)
        address = setup.machines[index].address
    if setup.own_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    model = setup.model()
    work = setup.work(model)
    pipe.send("prepared")
    with (
        tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory,
        p2ptrain.join(
            model,
            run_id="benchmark",
            initial_peers=pipe.recv(),
            sparta=p2ptrain.Sparta(fragment_fraction=setup.fragment_fraction),
            diloco=p2ptrain.DiLoCo(sync_every=setup.sync_every),
            host_maddrs=[f"/ip4/{address}/tcp/0"],
            gossip_budget=setup.gossip_budget,
            metrics=Path(directory) / "metrics.jsonl",
        ) as peer,
    ):
        assert isinstance(peer, p2ptrain.Peer), "one process, so no group"
        if index == 0:
            pipe.send(tuple(peer.maddrs))
        _wait_until(lambda: len(peer.alive) == peers - 1, timeout_s=60.0)
        pipe.send("ready")
        generator = torch.Generator().manual_seed(index)
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            pipe.send(_drift(model, generator) if message == DRIFT else _run(message, work, peer))


def _run(phase: Phase, work: Callable[[], None], peer: p2ptrain.Peer) -> list[Step]:
    steps: list[Step] = []
    for _ in range(phase.steps):
        started = time.perf_counter()
        work()
        computed = time.perf_counter()
        report = peer.step() if phase.exchange else None
        ended = time.perf_counter()
        # Private, because only a benchmark needs to know when a round is due.
        position = peer._exchange._position
        left = position.sync_every - (position.steps - position.base_at_steps)
        steps.append(Step(ended - started, ended - computed, report, peer._exchange.due, left))
        if phase.until_round and report is not None and report.round is not None:
            break
    return steps


@torch.no_grad()
def _drift(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device), alpha=_DRIFT)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise WorkerError("the peers did not find each other in time")
        time.sleep(0.05)
