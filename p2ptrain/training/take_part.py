"""The training itself, once the peer is in the run: the same on all of its ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING

from p2ptrain.monitor.formatting import count
from p2ptrain.signals import stop_on_signals
from p2ptrain.training.data.tokenizer import IDS
from p2ptrain.training.generation import generate_text
from p2ptrain.training.job import Job
from p2ptrain.training.loop import TrainingEnd, run_training
from p2ptrain.training.progress import TrainingProgress
from p2ptrain.training.ranks import Ranks
from p2ptrain.training.trainer import Trainer

if TYPE_CHECKING:
    from p2ptrain.peer.group_peer import GroupPeer
    from p2ptrain.peer.peer import Peer

SAMPLE_TOKENS = 100

logger = logging.getLogger(__name__)


def take_part(
    job: Job,
    trainer: Trainer,
    ranks: Ranks,
    member: Peer | GroupPeer,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[TrainingProgress], None],
) -> TrainingEnd:
    """All ranks: train until the run ends or the user stops it. Returns how it ended, as `run_training` does.

    Args:
        job: what is trained.
        trainer: trains the model that has joined.
        ranks: of this peer.
        member: what has joined with the model of `trainer`.
        say: prints one line; called on rank 0.
        on_progress: called every few seconds on rank 0.

    Raises ConfigError and TransientError as `run_training`.
    """
    with stop_on_signals() as received, ranks.lost_ranks_said():
        stop, now = ranks.agreed(received)
        config, tokenizer = job.config, job.tokenizer

        def sample() -> None:
            if not ranks.is_first:
                return
            try:
                written = generate_text(trainer.model, tokenizer, "\n", length=SAMPLE_TOKENS, temperature=0.8, seed=0)
                text = "".join(takewhile(lambda _: not received(), written))
            except Exception as error:  # a text is not worth a run
                logger.warning("no sample at step %d: %s", member.run_step, error)
            else:
                say(f"sample at step {member.run_step}: {text!r}")

        if config.sample_every and tokenizer.identity == IDS:
            say("--sample-every: not used, because the tokenizer of these ids is not known; name it with --tokenizer")
            config = dataclasses.replace(config, sample_every=0)
        if config.sample_every and config.fsdp == "on":
            say("--sample-every: not used, because the model is sharded (--fsdp)")
            config = dataclasses.replace(config, sample_every=0)
        say(_size_line(trainer))
        return run_training(
            member, trainer, config, out=job.out, stop=stop, now=now, on_progress=on_progress, on_sample_due=sample
        )


def _size_line(trainer: Trainer) -> str:
    """What is trained: with a large model, minutes pass before the next line."""
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    size = f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number:,}"
    windows = count(trainer.step_windows, "window")
    at_once = trainer.micro_batch * trainer.ranks.size
    parts = f", {at_once:,} at once" if at_once < trainer.step_windows else ""
    return (
        f"{size} parameters; a step is {windows} of {trainer.context:,} tokens{parts}; evaluating on "
        f"{trainer.eval_windows * trainer.context:,} held-out tokens first"
    )
