"""Our own side: real peers as processes that step through phases of a benchmark together.

A peer computes for a while, calls `peer.step()`, and so on, as a training loop does; the weights change only where a
phase says so. All phases of one swarm are run by the same peers, so that with and without can be compared.
"""

from __future__ import annotations

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
from benchmarks.processes import WorkerError, Workers

# No benchmark's step takes half as long, on a busy machine either (guess).
STEP_TIMEOUT_S = 1.0
# Longer than any benchmark: no round becomes due.
NEVER = 10**9
# Enough for a round to become due and land, whatever the setup.
ROUND_STEPS = 600
# What peers are told instead of a phase.
DRIFT = "drift"
# Some hundred inner steps move weights about this far; their own spread is 0.02 (guess).
_DRIFT = 0.001


@dataclass(frozen=True)
class Setup:
    """What is alike in all peers of a swarm.

    Attributes:
        model: importable function that builds the model, alike in every process.
        work: given the model, prepares what is called once a step; see `workloads.py`.
        fragment_fraction: p; 0 for no gossip.
        sync_every: H, in inner steps.
    """

    model: Callable[[], nn.Module]
    work: Callable[[nn.Module], Callable[[], None]]
    fragment_fraction: float = 0.0
    sync_every: int = NEVER


@dataclass(frozen=True)
class Phase:
    """What every peer is told to do next.

    Attributes:
        steps: how many steps; with `until_round` at most.
        exchange: whether `peer.step()` is called at all.
        until_round: stop after the step in which a round landed.
    """

    steps: int
    exchange: bool = True
    until_round: bool = False


@dataclass(frozen=True)
class Step:
    """One step of one peer.

    Attributes:
        whole_s: its seconds, the workload's included.
        exchange_s: seconds of `peer.step()`, seen from outside.
        report: what it returned, None where it was not called.
        due: whether a round was due after it.
    """

    whole_s: float
    exchange_s: float
    report: p2ptrain.StepReport | None
    due: bool


class Swarm:
    """Live peers that know each other; a context manager.

    `memory_before_join` is what each peer's process used with model and workload prepared.

    Args:
        setup: alike for all.
        peers: how many processes.
    """

    def __init__(self, setup: Setup, peers: int) -> None:
        self._peers = peers
        self._workers = Workers(_peer, [(setup, index, peers) for index in range(peers)])

    def __enter__(self) -> Swarm:
        self._workers.__enter__()
        try:
            self._workers.hear(timeout_s=60.0)
            self.memory_before_join = [memory(pid) for pid in self.pids]
            self._workers.tell_one(0, ())
            initial_peers = self._workers.hear_from(0, timeout_s=90.0)
            for index in range(1, self._peers):
                self._workers.tell_one(index, initial_peers)
            self._workers.hear(timeout_s=120.0)
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
        """The peers' processes; their p2pds are below them."""
        return self._workers.pids

    def run(self, phase: Phase) -> list[list[Step]]:
        """Let all peers go through a phase: the steps of each. Raises WorkerError when one fails or is too slow."""
        self._workers.tell(phase)
        steps: list[list[Step]] = self._workers.hear(timeout_s=60.0 + phase.steps * STEP_TIMEOUT_S)
        return steps

    def drift(self) -> None:
        """Change the weights, differently on each peer, as training would have."""
        self._workers.tell(DRIFT)
        self._workers.hear(timeout_s=60.0)

    def round(self) -> list[list[Step]] | None:
        """Run until a round has landed, after `drift`: the steps of each peer.

        None when the round was not committed with everybody in it, as may happen to the first.
        """
        peers = self.run(Phase(ROUND_STEPS, until_round=True))
        landed = [steps[-1].report.round for steps in peers if steps[-1].report]
        complete = all(
            report and report.status == "committed" and len(report.contributors) == self._peers for report in landed
        )
        return peers if complete else None

    def warm_up(self) -> None:
        """Run until fragments are merged on every peer. Raises WorkerError when they never are."""
        self.drift()
        for _ in range(10):
            peers = self.run(Phase(steps=10))
            if all(any(step.report and step.report.merged for step in steps) for steps in peers):
                return
        raise WorkerError("no fragments were merged in 100 steps")


def _peer(pipe: Connection, setup: Setup, index: int, peers: int) -> None:
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
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            metrics=Path(directory) / "metrics.jsonl",
        ) as peer,
    ):
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
        # Nothing public tells that a round is due: it is nobody's business but a benchmark's.
        steps.append(Step(ended - started, ended - computed, report, peer._exchange.due))
        if phase.until_round and report is not None and report.round is not None:
            break
    return steps


@torch.no_grad()
def _drift(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_DRIFT)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise WorkerError("the peers did not find each other in time")
        time.sleep(0.05)
