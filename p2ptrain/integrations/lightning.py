"""A Lightning `Trainer` that takes part in a run: one exchange after every optimizer step.

    join = partial(p2ptrain.join, run_id="gpt2", total_steps=10_000)
    Trainer(max_steps=10_000, callbacks=[P2PCallback(join)]).fit(module, batches)

The callback joins when the fit starts, because the Trainer has moved the model to its device by then, and leaves when
the fit ends, also by an exception. In a run with a length, the learning rate follows the position in the run, and the
Trainer stops when the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.position import set_position, state_or_nothing, wait_for_last_round, warn_of_schedulers
from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.peer import Peer

logger = logging.getLogger(__name__)


def count_examples(batch: Any) -> int:
    """The first dimension of the first tensor in a batch; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    for part in parts:
        if isinstance(part, torch.Tensor | Mapping | list | tuple):
            return count_examples(part)
    return 1


class P2PCallback(Callback):
    """Calls `peer.step()` after every optimizer step of a Trainer, also with `accumulate_grad_batches`.

    With manual optimization, it is called once after every batch in which an optimizer has stepped. With several
    devices (strategy "ddp"), the processes of the Trainer are one peer.

    The peer's state is saved in the Trainer's checkpoints, and `fit(ckpt_path=…)` restores it. If the run is further
    than the checkpoint by then, the run's weights are used. The Trainer's logs get the round and the number of peers.
    Its mean losses are recorded in the metrics stream every `log_every_n_steps`.

    Attributes:
        peer: the peer, from the start of a fit; None before.
    """

    def __init__(
        self,
        join: Callable[..., Peer | GroupPeer],
        *,
        count_samples: Callable[[Any], int] = count_examples,
        monitor: str = "val_loss",
    ) -> None:
        """
        Args:
            join: `p2ptrain.join` with arguments of yours (`functools.partial`). It is called with the module, `resume=`
                and `process_group=`.
            count_samples: how much a batch holds; rounds weight peers by it. Use the same on all peers.
            monitor: the metric of your `validation_step` that is recorded as the held-out loss, if there is one.
        """
        self.peer: Peer | GroupPeer | None = None
        self._join = join
        self._count_samples = count_samples
        self._monitor = monitor
        self._restored: dict[str, Any] | None = None
        self._in_run = self._told_failure = False
        # Since the last step: samples. Since the last recorded loss: sum of losses, on the device; steps that have a
        # loss, where a batch is a part of one; steps.
        self._samples = self._loss_steps = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._steps_summed = 0.0
        self._optimizer_steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run. Raises ConfigError if the Trainer's number of steps differs from the run's."""
        group = torch.distributed.group.WORLD if trainer.world_size > 1 else None
        self.peer = self._join(pl_module, resume=self._restored, process_group=group)
        self._in_run, self._told_failure, self._restored = True, False, None
        run = self.peer.run
        if length := run.total_steps:
            if trainer.max_steps not in (-1, length):
                raise ConfigError(
                    f"the Trainer's length is {trainer.max_steps} steps, but run {run.run_id!r} has {length}: give "
                    f"Trainer(max_steps={length})"
                )
            # The end of the run stops the Trainer: a peer may take more or fewer steps of its own than the run has.
            trainer.fit_loop.epoch_loop.max_steps = -1
        self._follow_the_run(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count. Optimizers, schedules and progress have been restored from a checkpoint by now."""
        self._samples = self._loss_steps = 0
        self._loss_sum = self._steps_summed = 0.0
        self._optimizer_steps = trainer.global_step
        assert self.peer is not None
        warn_of_schedulers((schedule.scheduler for schedule in trainer.lr_scheduler_configs), self.peer.run)
        self._follow_the_run(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exchange, if an optimizer has stepped."""
        assert self.peer is not None
        self._samples += self._count_samples(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):  # divided by the number of batches that are accumulated
            self._loss_sum = self._loss_sum + loss.detach()
            self._steps_summed += 1 / trainer.accumulate_grad_batches
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        samples, self._samples = self._samples, 0
        report = self.peer.step(self._mean_loss(trainer), samples)
        if report.round is not None:
            logger.info("round %d %s", report.round.round, report.round.status)
        if self.peer.failure is not None and not self._told_failure:
            self._told_failure = True
            logger.warning("cut off from the run, training goes on alone: %s", self.peer.failure)
        self.log_dict({"round": float(self.peer.round), "peers": 1.0 + len(self.peer.alive)}, batch_size=1)
        self._follow_the_run(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.peer is not None:
            self.peer.finish_landing()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.peer is not None and self._monitor in trainer.callback_metrics and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics[self._monitor])
            self.peer.record("eval", step=self.peer.run_step, loss=loss)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run, while the model is on its device. At the end of the run, wait for the last round before."""
        assert self.peer is not None
        wait_for_last_round(self.peer)
        self._leave()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run if there was nothing to train."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.peer is not None and self._in_run:
            self._in_run = False
            self.peer.leave(type(exception).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.peer is None else state_or_nothing(self.peer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for joining: the checkpoint is read before the fit starts."""
        self._restored = state_dict

    def _leave(self) -> None:
        if self.peer is not None and self._in_run:
            self._in_run = False
            self.peer.__exit__(None, None, None)

    def _mean_loss(self, trainer: Trainer) -> float | None:
        """Every `log_every_n_steps`, the mean loss since the last time: reading a loss waits for the device."""
        self._loss_steps += 1
        if trainer.log_every_n_steps == 0 or self._loss_steps % trainer.log_every_n_steps:
            return None
        mean = float(self._loss_sum) / self._steps_summed if self._steps_summed else None
        self._loss_sum, self._steps_summed, self._loss_steps = 0.0, 0.0, 0
        return mean

    def _follow_the_run(self, trainer: Trainer) -> None:
        """In a run with a length, set learning rates by the run's position, and stop the Trainer at its end."""
        assert self.peer is not None
        length, position = self.peer.run.total_steps, self.peer.run_step
        if not length:
            return
        if position >= length:
            trainer.should_stop = True
        for schedule in trainer.lr_scheduler_configs:
            if schedule.interval == "step":
                set_position(schedule.scheduler, position // schedule.frequency)
