"""The demo model with pauses, so that more peers than cores can train on one machine.

Use it with `p2ptrain join --model benchmarks.paced:half_a_core`.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from p2ptrain.training.models import build

# A step takes 5 ms of a core. With gossip, rounds, evaluations and the daemon, a peer takes 0.2 cores at 50 ms per step
# (measured), so about 0.3 at 30 ms: four peers fit on two cores, with some room for other programs.
STEP_VARIABLE = "PACED_STEP_S"
STEP_S = float(os.environ.get(STEP_VARIABLE, "0.03"))


class Paced(nn.Module):
    """A model whose training steps begin at least `STEP_S` apart; evaluations are not delayed."""

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
    """The demo model with a step every `STEP_S`, so that lost steps can be counted."""
    return Paced(_demo_model(vocab_size))


def half_a_core(vocab_size: int) -> nn.Module:
    """The demo model, which waits before each step for as long as it has computed since the last pause."""
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
