"""A peer for the training loops of other libraries: without a network, and with a pace of its own."""

from __future__ import annotations

from typing import Any

import torch

from p2ptrain.protocol.exchange.types import StepReport
from p2ptrain.settings.config import RunConfig
from tests.fakes import FakePeer


class Peer(FakePeer):
    """A fake peer whose run advances by `pace` steps per step of the Trainer, starting at `at`."""

    def __init__(self, total_steps: int = 0, *, at: int = 0, pace: float = 1.0) -> None:
        super().__init__(RunConfig(total_steps=total_steps))
        self.position, self.pace, self.samples = float(at), pace, list[int]()
        self.restored: dict[str, Any] | None = None
        self.waited = False

    @property
    def run_step(self) -> int:  # type: ignore[override]
        return int(self.position)

    @run_step.setter
    def run_step(self, step: int) -> None:
        pass

    def step(self, loss: float | None = None, samples: int = 0) -> StepReport:  # type: ignore[override]
        super().step(loss)
        self.position += self.pace
        self.samples.append(samples)
        return StepReport()

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        self.waited = True
        return True

    def state_dict(self) -> dict[str, Any]:
        self.settled_at.append(self.run_step)
        moments = [torch.full((2, 64), 2.0), torch.full((2, 64), 3.0)]
        place = {"genesis": "0-ef", "head": "ab12", "history": "cd34", "run_step": self.run_step, "tokens": 0}
        return {**place, "anchor": torch.ones(2, 64), "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.restored = state
        if self.run_step <= state["run_step"]:
            self.position = state["run_step"]
            return True
        return False

    def anchor_state_dict(self) -> dict[str, torch.Tensor]:
        return {"transformer.wte.weight": torch.full((16, 8), 0.5)}
