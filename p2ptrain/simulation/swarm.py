"""Runs one experiment: all peers of a swarm in one process and one thread, in virtual time."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trio
from torch import nn

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.memory_network.virtual_time import run_virtual
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import Drops, StepReport
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.state_sync.transfer import ModelBuffers
from p2ptrain.protocol.wire.transport import Inline
from p2ptrain.settings.link import BYTES_PER_MBIT
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.schedule import ScheduledEvent
from p2ptrain.training.data import Characters, Corpus, load_corpus
from p2ptrain.training.data.tokenizer import IDS, Ids
from p2ptrain.training.loop import record_evaluation, training_steps
from p2ptrain.training.models import build_of, context_length
from p2ptrain.training.partitioning import make_partition, one_thread, train_briefly
from p2ptrain.training.trainer import Trainer, TrainingData

logger = logging.getLogger(__name__)

# A run that takes this many times as long as expected counts as hanging.
MOST_TIMES_AS_LONG = 20
PROGRESS_EVERY_S = 1.0
POLL_S = 0.05
# Virtual seconds between checks of a peer that waits for the run's state.
LOOK_S = 0.01


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
    with one_thread(), torch.random.fork_rng(devices=[]):
        simulation = _Simulation(experiment, on_progress)
        records = run_virtual(simulation.main, experiment.seed)
        on_end([peer.trainer.model for peer in simulation.present.values()])
        return records


class SimulatedPeer:
    """A real node on the memory network, with the training loop of `p2ptrain join`, in virtual time.

    Implements `training.SteppingPeer`. `records` has the same events as a real peer's metrics file.
    """

    def __init__(self, number: int, incarnation: int, swarm: _Simulation) -> None:
        experiment, network, partition = swarm.experiment, swarm.network, swarm.partition
        model = copy.deepcopy(swarm.model)
        self.number = number
        self.peer_id = f"peer-{number}"
        self.run = run = experiment.run
        self.speed = experiment.speeds[number] if number < len(experiment.speeds) else 1.0
        self.awake = trio.Event()
        self.awake.set()
        self.records: list[dict[str, Any]] = []
        self._event_log = EventLog(trio.current_time)
        self.failure: Exception | None = None
        self.ended = False
        self._measured_at = -1
        self._run_audit = swarm.run_audit
        self._experiment = experiment
        parts = ModelParts(model)
        spans, shard_tokens = None, 0
        if partition is not None:
            share = number % partition.count
            spans, shard_tokens = partition.spans(share), partition.sizes[share]
        seed = run.data_seed(self.peer_id)
        data = TrainingData(swarm.corpus, spans=spans)
        self.trainer = Trainer(model, data, run, batch_size=experiment.batch_size, seed=seed)
        averaged = parts.averaged(run, self.trainer.optimizer.adamw)
        name = f"{self.peer_id}.{incarnation}"
        weather = random.Random(f"weather/{experiment.seed}/{name}")
        drops = Drops(
            fragment=lambda: experiment.loss > 0 and weather.random() < experiment.loss,
            gradient=lambda: weather.random() < experiment.drop,
        )
        clock = trio.current_time
        self._exchange = Exchange(parts.view, run, averaged=averaged, clock=clock, post=operator.call, drops=drops)
        self._exchange.shard_tokens = shard_tokens
        of_run = {"run_id": run.run_id, "run_digest": run.digest, "run": run.to_dict()}
        self.record("start", peer_id=self.peer_id, maddrs=[], incarnation=name, parameters=parts.space.numel, **of_run)
        transport = network.transport(self.peer_id)
        # Only peer 0 may found the run.
        self.node = Node(
            RunSpec(run),
            NetworkAccess(transport, network.directory(self.peer_id), transport.bulk),
            LocalPolicy(),
            NodeStart(name, random.Random(f"{run.run_seed}/{name}"), may_found=number == 0 and incarnation == 0),
            exchange=self._exchange,
            buffers=ModelBuffers(parts.buffers, parts.load_buffers, parts.most_buffer_bytes),
            telemetry=Telemetry(self.record, self._event_log, ErrorLog(logger)),
            compute=Inline(),
        )
        self._scope = trio.CancelScope()

    # For the training loop.

    @property
    def run_step(self) -> int:
        return self._exchange.run_step

    @property
    def finished(self) -> bool:
        return self._exchange.finished

    def step(self, loss: float | None = None, samples: int = 0) -> StepReport:
        report = self._exchange.step(samples)
        step_s = round(self._exchange.step_s, 6)
        self.record("step", step=self.run_step, loss=loss, tokens=samples, step_s=step_s, exchange_s=0.0)
        return report

    def finish_landing(self) -> bool:
        return self._exchange.finish_landing()

    def record(self, event: str, /, **fields: Any) -> None:
        if event == "eval":
            self._measured_at = self.run_step
        self.records.append({"event": event, "t": round(trio.current_time(), 6), **fields})
        self._run_audit.note(self.peer_id, self.records[-1])
        self._event_log.write(event, **fields)

    def leave(self, reason: str) -> None:
        """Leave the run, and end."""
        self.record("stop", reason=reason)
        self.node.leave(reason)
        self.ended = True

    # For the simulation.

    async def live(self, begun: trio.Event) -> None:
        """Join, train once `begun` is set, and leave."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.node.run_forever)
                    while not self.node.ready.is_set():
                        self._exchange.idle()
                        await trio.sleep(LOOK_S)
                    await begun.wait()
                    await self._train()
                    await self.node.stay()
                    self.leave("finished")
                    await trio.sleep(1.0)  # for the goodbye to reach other peers
                    nursery.cancel_scope.cancel()
        except* Exception as errors:
            self.failure = errors
        finally:
            self.ended = True

    def crash(self) -> None:
        """End at once, without leaving."""
        self._scope.cancel()
        self.ended = True

    async def _train(self) -> None:
        record_evaluation(self, self.trainer, self._experiment.eval_every)
        while not self.finished:
            for _ in training_steps(self, self.trainer, eval_every=self._experiment.eval_every):
                await trio.sleep(self._experiment.step_s / self.speed)
                await self.awake.wait()
            if self._measured_at < self.run_step:
                record_evaluation(self, self.trainer, self._experiment.eval_every)
            while not self.finished and self.run_step >= self.run.total_steps:
                self._exchange.idle()
                await trio.sleep(self._experiment.step_s)
        record_evaluation(self, self.trainer, self._experiment.eval_every)


class _Simulation:
    """One run: its peers, and the model, text, network and audit that they share."""

    def __init__(self, experiment: Experiment, on_progress: Callable[[int], None]) -> None:
        self._on_progress = on_progress
        run = experiment.run
        # Token files have ids; text is read as characters.
        tokenizer = Ids(run.vocab_size) if run.tokenizer == IDS else Characters()
        self.corpus: Corpus = load_corpus(experiment.data, tokenizer)
        # Every peer starts with a copy.
        self.model = build_of(run)
        if experiment.pretrain_steps:
            train_briefly(self.model, self.corpus, run, steps=experiment.pretrain_steps)
        context, cpu = context_length(self.model), torch.device("cpu")
        self.partition = make_partition(run, self.corpus, context=context, device=cpu)
        run = dataclasses.replace(run, model_layout=ModelParts(self.model).layout)
        self.experiment = dataclasses.replace(experiment, run=run)
        self._all: list[SimulatedPeer] = []
        self.run_audit = RunAudit()
        # Sides of the current partition, by peer id.
        self._sides: dict[str, float] = {}
        self._schedule_done = False

    async def main(self) -> Records:
        experiment = self.experiment
        rate = experiment.bandwidth_mbit * BYTES_PER_MBIT or math.inf
        self.network = MemoryNetwork(latency_s=experiment.latency_s, bandwidth_bytes_s=rate)
        self.present: dict[int, SimulatedPeer] = {}
        self._begun = trio.Event()
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for number in range(experiment.peers):
                if not experiment.starts_late(number):
                    self._start(number)
            first = list(self.present.values())
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
        events = {peer.node.incarnation: peer.records for peer in self._all}
        return Records(experiment, events, began_s, self.run_audit)

    def _start(self, number: int) -> None:
        peer = SimulatedPeer(number, sum(other.number == number for other in self._all), self)
        self._all.append(peer)
        self.present[number] = peer
        self._nursery.start_soon(peer.live, self._begun)

    async def _follow_schedule(self, began_s: float) -> None:
        for event in self.experiment.scheduled_events:
            await trio.sleep_until(began_s + event.step * self.experiment.step_s)
            self._apply(event)
        self._schedule_done = True

    def _apply(self, event: ScheduledEvent) -> None:
        name, peer = f"peer-{event.peer}", self.present.get(event.peer)
        match event.action:
            case "narrow":
                self.network.narrow(name, event.value * BYTES_PER_MBIT)
            case "widen":
                self.network.narrow(name, None)
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
                    self.network.crash(name)
                else:
                    peer.leave("left")
                peer.crash()
                del self.present[event.peer]
            case "pause":
                peer.awake = trio.Event()
            case "resume":
                peer.awake.set()
            case "speed":
                peer.speed = event.value

    def _divide(self, sides: dict[str, float]) -> None:
        self._sides = sides
        self.network.partition(*([name for name in sides if sides[name] == side] for side in set(sides.values())))

    async def _await_end(self, began_s: float) -> None:
        experiment = self.experiment
        slowest = min([1.0, *experiment.speeds, *(e.value for e in experiment.schedule if e.action == "speed")])
        deadline_s = began_s + MOST_TIMES_AS_LONG * (60 + experiment.run.total_steps * experiment.step_s / slowest)
        told_s = -math.inf
        # With no peer present, the schedule may still let one join.
        while not all(peer.ended for peer in self.present.values()) or not (self.present or self._schedule_done):
            self._check_failures()
            now = trio.current_time()
            if now - told_s >= PROGRESS_EVERY_S:
                told_s = now
                self._on_progress(max((peer.run_step for peer in self.present.values()), default=0))
            if now > deadline_s:
                where = ", ".join(f"{peer.peer_id}: {peer.node.status}" for peer in self.present.values())
                raise ConfigError(f"the simulated run did not come to its end ({where}); is a peer too slow?")
            await trio.sleep(POLL_S)
        self._check_failures()

    def _check_failures(self) -> None:
        broken = self.run_audit.disagreements
        assert not broken, f"the promise of the round protocol is broken (seed {self.experiment.seed}): {broken[0]}"
        for peer in self._all:
            if peer.failure is not None:
                raise peer.failure
