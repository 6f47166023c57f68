"""A simulated peer: a real node on the memory network, with the training loop of `p2ptrain join`, in virtual time."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import torch
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import Drops, StepReport
from p2ptrain.protocol.node.config import LocalPolicy, ModelBuffers, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.wire.transport import Inline
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.training.data import Corpus, Partition
from p2ptrain.training.loop import record_evaluation, training_steps
from p2ptrain.training.trainer import Trainer, TrainingData

# Virtual seconds between checks of a peer that waits for the run's state.
LOOK_S = 0.01


class SimulatedPeer:
    """Implements `training.SteppingPeer`. `records` has the same events as a real peer's metrics file."""

    def __init__(
        self,
        number: int,
        experiment: Experiment,
        model: torch.nn.Module,
        corpus: Corpus,
        network: MemoryNetwork,
        incarnation: int,
        partition: Partition | None,
        run_audit: RunAudit,
    ) -> None:
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
        self._run_audit = run_audit
        self._experiment = experiment
        parts = ModelParts(model)
        spans, shard_tokens = None, 0
        if partition is not None:
            share = number % partition.count
            spans, shard_tokens = partition.spans(share), partition.sizes[share]
        seed = run.data_seed(self.peer_id)
        self.trainer = Trainer(
            model, TrainingData(corpus, spans=spans), run, batch_size=experiment.batch_size, seed=seed
        )
        averaged = parts.averaged(run, self.trainer.optimizer.adamw)
        name = f"{self.peer_id}.{incarnation}"
        weather = random.Random(f"weather/{experiment.seed}/{name}")
        drops = Drops(
            fragment=lambda: experiment.loss > 0 and weather.random() < experiment.loss,
            gradient=lambda: weather.random() < experiment.drop,
        )
        self._exchange = Exchange(
            parts.view, run, averaged=averaged, clock=trio.current_time, post=_at_once, drops=drops
        )
        self._exchange.shard_tokens = shard_tokens
        self.record(
            "start",
            peer_id=self.peer_id,
            run_id=run.run_id,
            run_digest=run.digest,
            maddrs=[],
            incarnation=name,
            parameters=parts.space.numel,
            run=run.to_dict(),
        )
        transport = network.transport(self.peer_id)
        # Only peer 0 may found the run.
        self.node = Node(
            RunSpec(run),
            NetworkAccess(transport, network.directory(self.peer_id), transport.bulk),
            LocalPolicy(),
            NodeStart(name, random.Random(f"{run.run_seed}/{name}"), may_found=number == 0 and incarnation == 0),
            exchange=self._exchange,
            buffers=ModelBuffers(parts.buffers, parts.load_buffers),
            telemetry=Telemetry(self.record, self._event_log, ErrorLog(logging.getLogger(__name__))),
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
        self.record(
            "step",
            step=self._exchange.run_step,
            loss=loss,
            tokens=samples,
            step_s=round(self._exchange.step_s, 6),
            exchange_s=0.0,
        )
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

    async def live(self, start: Callable[[], Any]) -> None:
        """Join, train and leave. `start` waits until training may begin."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.node.run_forever)
                    while not self.node.ready.is_set():
                        self._exchange.idle()
                        await trio.sleep(LOOK_S)
                    await start()
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


def _at_once(work: Callable[[], object]) -> None:
    work()
