"""The demo model at a pace: its peers leave each other room on a machine that has fewer cores than peers.

`p2ptrain join --model benchmarks.paced:half_a_core` trains one.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from p2ptrain.training.models import build

# A step takes 5 ms alone on a core; with gossip, rounds, measurements and the daemon a peer takes 0.2 cores at 50 ms
# (measured), and so about 0.3 at this: four fit on two cores, with room for what else there runs.
STEP_VARIABLE = "PACED_STEP_S"
STEP_S = float(os.environ.get(STEP_VARIABLE, "0.03"))


class Paced(nn.Module):
    """A model whose training steps begin at least `STEP_S` apart; measuring it takes no longer than it does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.context = model.context
        self._next_s = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens (batch, time)."""
        if self.training:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            self._next_s = time.monotonic() + STEP_S
        logits: torch.Tensor = self.model(tokens)
        return logits


def evenly(vocab_size: int) -> Paced:
    """A step every `STEP_S`, whatever else the machine does: what was missed can be counted."""
    return Paced(_demo_model(vocab_size))


def half_a_core(vocab_size: int) -> nn.Module:
    """Waits before each step for as long as the step before it took of a core."""
    model = _demo_model(vocab_size)
    last_s = time.thread_time()

    def pause(*arguments: object) -> None:
        nonlocal last_s
        used_s = time.thread_time() - last_s
        time.sleep(min(used_s, 1.0))
        last_s = time.thread_time()

    model.register_forward_pre_hook(pause)
    return model


def _demo_model(vocab_size: int) -> nn.Module:
    return build("gpt-demo", vocab_size=vocab_size, seed=torch.initial_seed() % 2**31)
