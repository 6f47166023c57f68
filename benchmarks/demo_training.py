"""The training that p2ptrain and a rival both do: the demo model, its text, its inner optimizer and its evaluation.

Both sides take initial weights, each peer's windows of text and the learning rates from here, with the same seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from benchmarks.held_out import mean_loss
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import build
from p2ptrain.training.trainer import Trainer, TrainingData

# As in the demo.
BATCH_SIZE = 4
# Eight times as many as a peer evaluates itself on, so that the text adds little to the noise between seeds.
EVAL_WINDOWS = 512
EVAL_BATCH = 64


@dataclass(frozen=True)
class Training:
    """A training by SPARTA with DiLoCo.

    Attributes:
        seed: seeds the initial weights, the choice of fragments and, with a peer's number, its windows of text.
        peers: k.
        steps: inner steps of each peer.
        sync_every: H, inner steps between two rounds.
        fragment_fraction: p, the share of the weights that is averaged or pushed at each step.
    """

    seed: int
    peers: int = 4
    steps: int = 600
    sync_every: int = 100
    fragment_fraction: float = 0.02

    def model(self) -> nn.Module:
        """The model with its initial weights, equal on all peers."""
        return build("gpt-demo", vocab_size=RunConfig.vocab_size, seed=self.seed)

    def trainer(self, model: nn.Module, rank: int) -> Trainer:
        """The trainer of one peer: inner optimizer, schedule and text."""
        run = RunConfig(total_steps=self.steps)
        return Trainer(
            model,
            TrainingData(load_corpus("stdlib", Characters())),
            run,
            batch_size=BATCH_SIZE,
            seed=1000 * self.seed + rank,
        )


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        loss: loss of the merged model on held-out text, in nats.
        held_s: seconds that each exchange blocked training, for all steps of all peers.
        sent_bytes: payload sent on all TCP connections, per peer and step.
        wall_s: seconds from the common start to the last peer's end.
    """

    loss: float
    held_s: list[float]
    sent_bytes: float
    wall_s: float


def held_out_loss(model: nn.Module) -> float:
    """Mean loss in nats on fixed windows of the held-out text."""
    held_out = load_corpus("stdlib", Characters()).held_out
    return mean_loss(model, held_out, windows=EVAL_WINDOWS, batch=EVAL_BATCH)
