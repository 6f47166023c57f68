"""A `transformers.Trainer` that takes part in a run: one exchange after every optimizer step.

    with p2ptrain.join(model, run_id="gpt2", total_steps=arguments.max_steps) as peer:
        Trainer(model, arguments, train_dataset=…, callbacks=[P2PCallback(peer)]).train()

The `with` block leaves the run, also after an exception. In a run with a length, the learning rate follows the position
in the run, so that a late joiner continues where the other peers are, and the Trainer stops when the run ends.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.position import set_position, state_or_nothing, wait_for_last_round, warn_of_schedulers
from p2ptrain.peer.group_peer import GroupPeer
from p2ptrain.peer.model_tensors import plain_names
from p2ptrain.peer.peer import Peer

# The peer's part of a Trainer's checkpoint.
STATE_FILE = "p2ptrain.safetensors"

logger = logging.getLogger(__name__)


class P2PCallback(TrainerCallback):
    """Calls `peer.step()` after every optimizer step of a Trainer, also with gradient accumulation.

    The peer's state is saved in the Trainer's checkpoints, and `train(resume_from_checkpoint=True)` restores it. If the
    run is further than the checkpoint by then, the run's weights are used. The Trainer's logs get the round and the
    number of peers, and its mean losses are recorded in the metrics stream.

    Rounds weight a peer by the examples that it has trained on, or by tokens with
    `TrainingArguments(include_num_input_tokens_seen="all")`. Use the same on all peers.
    """

    def __init__(self, peer: Peer | GroupPeer) -> None:
        """
        Args:
            peer: has joined with the Trainer's model. Move the model to the Trainer's device before joining
                (`model.to(arguments.device)`), because the Trainer moves it otherwise.
        """
        self._peer = peer
        self._loss: float | None = None
        self._tokens_seen = 0
        self._told_failure = False
        # The peer's part of the checkpoint that the Trainer is about to write; empty on other ranks.
        self._saved: dict[str, Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore a checkpoint.

        Raises ConfigError if the Trainer trains another model than the peer's, if its number of steps differs from the
        run's, or if the run was founded with other weights than the checkpoint's, which has no state of a peer.
        """
        if not self._peer.shares_weights_with(kwargs["model"]):
            raise ConfigError(
                "the Trainer trains another model than the one that joined the run, as with Trainer(model_init=…): "
                "give Trainer the model that p2ptrain.join() got"
            )
        length = self._peer.run.total_steps
        if length and state.max_steps != length:
            raise ConfigError(
                f"the Trainer's length is {state.max_steps} steps, but run {self._peer.run.run_id!r} has {length}: "
                f"give TrainingArguments(max_steps={length})"
            )
        if length and args.load_best_model_at_end:
            logger.warning(
                "load_best_model_at_end=True: the run's last round replaces the best model after it was loaded; load "
                "it from its checkpoint in %s instead",
                args.output_dir,
            )
        warn_of_schedulers(filter(None, [kwargs["lr_scheduler"]]), self._peer.run)
        if state.global_step:
            self._resume(_checkpoint(args, state) / STATE_FILE, kwargs["model"])
        self._tokens_seen = state.num_input_tokens_seen
        self._follow_the_run(state, control, kwargs["lr_scheduler"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        report = self._peer.step(self._loss, self._samples(args, state))
        self._loss = None
        if report.round is not None:
            logger.info("round %d %s", report.round.round, report.round.status)
        if self._peer.failure is not None and not self._told_failure:
            self._told_failure = True
            logger.warning("cut off from the run, training goes on alone: %s", self._peer.failure)
        self._follow_the_run(state, control, kwargs["lr_scheduler"])
        self._settle(args, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(args, control)

    def _settle(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Before the Trainer evaluates, and saves the model: that and the peer's state must be of the same round."""
        self._saved = None
        if control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            self._saved = state_or_nothing(self._peer)
        elif control.should_evaluate:
            self._peer.finish_landing()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the Trainer's mean loss since its last log, to record it with the next step."""
        logs = kwargs["logs"]
        # An evaluation logs too, without it, before the next step.
        self._loss = logs.get("loss", self._loss)
        logs |= {"round": self._peer.round, "peers": 1 + len(self._peer.alive)}

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "eval_loss" in kwargs["metrics"]:
            self._peer.record("eval", step=self._peer.run_step, loss=kwargs["metrics"]["eval_loss"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = state_or_nothing(self._peer) if self._saved is None else self._saved
        self._saved = None
        if saved:
            tensors = {"anchor": saved["anchor"]} | {f"moment {i}": m for i, m in enumerate(saved["moments"])}
            texts = {name: str(value) for name, value in saved.items() if name not in ("anchor", "moments")}
            # Whole or not at all: a file that was cut off could not be read.
            file = _checkpoint(args, state) / STATE_FILE
            save_file(tensors, temporary := file.with_name(f".{file.name}.tmp"), metadata=texts)
            temporary.replace(file)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """At the end of the run, wait for the last round, after which all peers have the same weights."""
        length, position = self._peer.run.total_steps, self._peer.run_step
        if position < length and not control.should_training_stop:
            logger.warning(
                "the Trainer has ended at step %d of %d of the run, because its dataset has a length: it then takes at "
                "most max_steps steps, and a peer that is faster than others needs more; give an IterableDataset",
                position,
                length,
            )
        wait_for_last_round(self._peer)

    def _samples(self, args: TrainingArguments, state: TrainerState) -> int:
        """Examples or tokens that this process trained on in the last optimizer step."""
        if args.include_num_input_tokens_seen in ("no", False):  # False before transformers 5
            return int(args.train_batch_size * args.gradient_accumulation_steps)
        tokens, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        return int(tokens // args.world_size)

    def _follow_the_run(self, state: TrainerState, control: TrainerControl, scheduler: object) -> None:
        """In a run with a length, set the learning rate by the run's position, and stop the Trainer at its end."""
        length, position = self._peer.run.total_steps, self._peer.run_step
        if not length:
            return
        # One more than are left, as the run's position may advance by less than one per step of this peer.
        state.max_steps = state.global_step + length - position + 1
        control.should_training_stop |= position >= length
        set_position(scheduler, position)

    def _resume(self, file: Path, model: torch.nn.Module) -> None:
        """Restore the peer's state after the Trainer has overwritten the run's weights with a checkpoint."""
        if file.exists() and self._peer.load_state_dict(_read(file)):
            return
        anchor = self._peer.anchor_state_dict()
        parameters = {name: of for name, of in plain_names(model, model.named_parameters()) if name in anchor}
        is_same = all(torch.equal(of, anchor[name].to(of.device, of.dtype)) for name, of in parameters.items())
        if self._peer.founded and not file.exists() and not is_same:
            raise ConfigError(
                f"{file.parent} has no {file.name}, and this peer has founded run {self._peer.run.run_id!r} with other "
                f"weights: join with the model of that checkpoint, or join other peers of the run"
            )
        why = "the run begins with the checkpoint's weights" if is_same else "the run is further than the checkpoint"
        logger.info("%s; using the run's weights, at step %d of the run", why, self._peer.run_step)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(anchor[name])


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Directory of the Trainer's checkpoint of this step."""
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


def _read(file: Path) -> dict[str, Any]:
    """Read a `Peer.state_dict()`."""
    with safe_open(file, framework="pt") as saved:
        moments = [saved.get_tensor(name) for name in sorted(saved.keys()) if name != "anchor"]
        texts = saved.metadata()
        step = int(texts["run_step"])
        return {**texts, "run_step": step, "anchor": saved.get_tensor("anchor"), "moments": moments}
