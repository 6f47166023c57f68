"""Runs one experiment: all peers in one process and one thread, in virtual time."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import trio
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.memory_network.virtual_time import run_virtual
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.settings.link import BYTES_PER_MBIT
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.peer import SimulatedPeer
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.schedule import ScheduledEvent
from p2ptrain.training.data import Characters, Corpus, load_corpus
from p2ptrain.training.data.tokenizer import IDS, Ids
from p2ptrain.training.models import build_of, context_length
from p2ptrain.training.partitioning import make_partition, train_briefly

# A run that takes so many times its expected time counts as hanging.
MOST_TIMES_AS_LONG = 20
PROGRESS_EVERY_S = 1.0
POLL_S = 0.05


def simulate(
    experiment: Experiment,
    on_progress: Callable[[int], None] = lambda step: None,
    on_end: Callable[[Sequence[nn.Module]], None] = lambda models: None,
) -> Records:
    """Simulate a run.

    The same experiment gives the same records, byte for byte, on the same machine and version of torch.

    Args:
        experiment: what to simulate.
        on_progress: called from time to time with the run's step.
        on_end: called with the models of the peers that are there at the end.

    Raises:
        ConfigError: a setting is invalid, or the run does not end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads do not pay off for the demo model, and change the order of sums
    try:
        with torch.random.fork_rng(devices=[]):
            return run_virtual(_Simulation(experiment, on_progress, on_end).main, experiment.seed)
    finally:
        torch.set_num_threads(threads)


class _Simulation:
    def __init__(
        self,
        experiment: Experiment,
        on_progress: Callable[[int], None],
        on_end: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        self._on_progress = on_progress
        self._on_end = on_end
        run = experiment.run
        # Token files have ids; text is read as characters.
        tokenizer = Ids(run.vocab_size) if run.tokenizer == IDS else Characters()
        self._corpus: Corpus = load_corpus(experiment.data, tokenizer)
        # Every peer starts with a copy.
        self._model = model = build_of(run)
        if experiment.pretrain_steps:
            train_briefly(model, self._corpus, experiment.run, steps=experiment.pretrain_steps)
        layout = ModelParts(model).layout_sha256
        self._partition = make_partition(
            experiment.run, self._corpus, context=context_length(model), device=torch.device("cpu")
        )
        self._experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, model_layout=layout))
        self._all: list[SimulatedPeer] = []
        self._run_audit = RunAudit()
        # Sides of the current partition, by peer id.
        self._sides: dict[str, float] = {}
        self._schedule_done = False

    async def main(self) -> Records:
        experiment = self._experiment
        mbit = experiment.bandwidth_mbit
        self._network = MemoryNetwork(
            latency_s=experiment.latency_s, bandwidth_bytes_s=mbit * BYTES_PER_MBIT if mbit else math.inf
        )
        self._present: dict[int, SimulatedPeer] = {}
        self._begun = trio.Event()
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for number in range(experiment.peers):
                if not experiment.starts_late(number):
                    self._start(number)
            first = list(self._present.values())
            # All start with the same weights at the same time, as the papers' workers do.
            while not all(peer.node.ready.is_set() for peer in first):
                self._check_failures()
                await trio.sleep(POLL_S)
            began_s = trio.current_time()
            self._begun.set()
            nursery.start_soon(self._follow_schedule, began_s)
            try:
                await self._await_end(began_s)
            except Exception as error:
                failure = error  # raised below, outside the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        self._on_end([peer.trainer.model for peer in self._present.values()])
        return Records(
            experiment, {peer.node.incarnation: peer.records for peer in self._all}, began_s, self._run_audit
        )

    def _start(self, number: int) -> None:
        incarnation = sum(peer.number == number for peer in self._all)
        peer = SimulatedPeer(
            number,
            self._experiment,
            copy.deepcopy(self._model),
            self._corpus,
            self._network,
            incarnation,
            self._partition,
            self._run_audit,
        )
        self._all.append(peer)
        self._present[number] = peer
        self._nursery.start_soon(peer.live, self._begun.wait)

    async def _follow_schedule(self, began_s: float) -> None:
        for event in self._experiment.scheduled_events:
            await trio.sleep_until(began_s + event.step * self._experiment.step_s)
            self._apply(event)
        self._schedule_done = True

    def _apply(self, event: ScheduledEvent) -> None:
        name, peer = f"peer-{event.peer}", self._present.get(event.peer)
        match event.action:
            case "narrow":
                self._network.narrow(name, event.value * BYTES_PER_MBIT)
            case "widen":
                self._network.narrow(name, None)
            case "cut":
                self._divide({**self._sides, name: event.value})
            case "mend":
                self._divide({other: side for other, side in self._sides.items() if other != name})
            case "join" if peer is None:
                self._start(event.peer)
            case _ if peer is None:
                pass
            case "crash" | "leave":
                if event.action == "crash":
                    self._network.crash(name)
                else:
                    peer.leave("left")
                peer.crash()
                del self._present[event.peer]
            case "pause":
                peer.awake = trio.Event()
            case "resume":
                peer.awake.set()
            case "speed":
                peer.speed = event.value

    def _divide(self, sides: dict[str, float]) -> None:
        self._sides = sides
        self._network.partition(*([name for name in sides if sides[name] == side] for side in set(sides.values())))

    async def _await_end(self, began_s: float) -> None:
        experiment = self._experiment
        slowest = min([1.0, *experiment.speeds, *(e.value for e in experiment.schedule if e.action == "speed")])
        deadline_s = began_s + MOST_TIMES_AS_LONG * (60 + experiment.run.total_steps * experiment.step_s / slowest)
        told_s = -math.inf
        # With no peer present, the schedule may still let one join.
        while not all(peer.ended for peer in self._present.values()) or not (self._present or self._schedule_done):
            self._check_failures()
            now = trio.current_time()
            if now - told_s >= PROGRESS_EVERY_S:
                told_s = now
                self._on_progress(max((peer.run_step for peer in self._present.values()), default=0))
            if now > deadline_s:
                where = ", ".join(f"{peer.peer_id}: {peer.node.status}" for peer in self._present.values())
                raise ConfigError(f"the simulated run did not come to its end ({where}); is a peer too slow?")
            await trio.sleep(POLL_S)
        self._check_failures()

    def _check_failures(self) -> None:
        broken = self._run_audit.disagreements
        assert not broken, f"the promise of the round protocol is broken (seed {self._experiment.seed}): {broken[0]}"
        for peer in self._all:
            if peer.failure is not None:
                raise peer.failure
