"""Workloads between two calls of `peer.step()`: each takes the model and returns a function to call in every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import build
from p2ptrain.training.trainer import Trainer, TrainingData


@dataclass(frozen=True)
class Pause:
    """Wait without computing, as if a GPU did the work and the CPU were free."""

    seconds: float

    def __call__(self, model: nn.Module) -> Callable[[], None]:
        return lambda: time.sleep(self.seconds)


@dataclass(frozen=True)
class Busy:
    """A fixed number of matrix products that take `seconds` of a free core, and longer on a busy one."""

    seconds: float

    def __call__(self, model: nn.Module) -> Callable[[], None]:
        matrix = torch.randn(256, 256)
        product = torch.empty(256, 256)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix, out=product)

        multiply(20)
        started = time.thread_time()
        multiply(50)
        times = max(1, round(50 * self.seconds / (time.thread_time() - started)))
        return lambda: multiply(times)


@dataclass(frozen=True)
class AdamStates:
    """Create gradients and the inner optimizer's state, then wait as `Pause` does."""

    seconds: float

    def __call__(self, model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

        def wait() -> None:
            assert optimizer.state  # keeps the optimizer alive
            time.sleep(self.seconds)

        return wait


def train_demo_model(model: nn.Module) -> Callable[[], None]:
    """Train the demo model, as `p2ptrain demo` does."""
    trainer = Trainer(
        model, TrainingData(load_corpus("stdlib", Characters())), RunConfig(total_steps=0), batch_size=4, seed=0
    )
    return lambda: _train(trainer)


def demo_model() -> nn.Module:
    """The model that `p2ptrain demo` and a bare `p2ptrain join` train."""
    return build("gpt-demo", vocab_size=RunConfig.vocab_size, seed=0)


def _train(trainer: Trainer) -> None:
    trainer.step(0)
