"""What the ranks of `p2ptrain join` do that are not on the network: they train, and leave the rest to rank 0."""

from __future__ import annotations

import dataclasses
import logging
import signal
from contextlib import ExitStack

import torch

from p2ptrain.settings.torchrun import Launch
from p2ptrain.signals import SIGNALS
from p2ptrain.training.job import be_told, build_model, build_trainer, place_model
from p2ptrain.training.ranks import join_ranks, open_ranks
from p2ptrain.training.take_part import take_part


def follow(launch: Launch) -> None:
    """Train what rank 0 tells; blocks until it ends. Prints nothing but errors of this rank.

    Raises:
        ConfigError: this rank cannot train; TransientError if others have ended.
        SystemExit: something is wrong that rank 0 says.
    """
    logging.getLogger("p2ptrain").setLevel(logging.ERROR)
    # Until training begins there is nothing to save, and waiting for rank 0 cannot be interrupted otherwise.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job of a shell
            signal.signal(number, signal.SIG_DFL)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(launch))
        with ranks.lost_ranks_said(first_speaks=True):
            job = be_told(ranks, launch)
            if job is None:
                return
            if job.config.threads:
                torch.set_num_threads(job.config.threads)
            model = build_model(job)
            place_model(job, model, ranks)
            trainer, _, _ = build_trainer(job, model, ranks, _say_nothing)
            job = dataclasses.replace(job, saved=None)  # free it
            member, _ = join_ranks(model, ranks)
            stack.enter_context(ranks.lost_ranks_said())  # also while the member leaves
            stack.push(member)
        take_part(job, trainer, ranks, member, say=_say_nothing, on_progress=lambda progress: None)


def _say_nothing(line: str) -> None:
    """Rank 0 says it."""
