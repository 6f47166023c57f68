"""The demo model at a pace: its peers leave each other room on a machine that has fewer cores than peers."""

from __future__ import annotations

import time

import torch
from torch import nn

from p2ptrain.models import build

# A step takes 5 ms alone on a core; with gossip, rounds, measurements and the daemon a peer takes 0.2 cores at 50 ms
# (measured), and so about 0.3 at this: four fit on two cores, with room for what else there runs.
STEP_S = 0.03


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


def paced(vocab_size: int) -> Paced:
    """What `p2ptrain join --model benchmarks.soak.model:paced` trains."""
    return Paced(build("gpt-demo", vocab_size=vocab_size, seed=torch.initial_seed() % 2**31))
