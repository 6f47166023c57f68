"""Local training: a model, its inner optimizer and its text. It does not use the network.

AdamW with linear warm-up and cosine decay (DiLoCo, table 5). The learning rate depends on the *run's* step, so a late
joiner continues the run's schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from p2ptrain.algorithms.metrics import sample_indices
from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Corpus, RandomWindows, fixed_windows
from p2ptrain.training.models import context_length

# DiLoCo, table 5; beta 2 as in nanoGPT.
BETAS = (0.9, 0.95)
GRADIENT_CLIP = 1.0
# Cosine to 10 %: as in nanoGPT.
FINAL_LR_SHARE = 0.1
# The windows are fixed, so a few suffice to compare curves; 4096 characters cost about six steps of the demo model.
EVAL_TOKENS = 4096
EVAL_BATCH = 16
# Enough coordinates for a correlation to within a percent or two; 5 kB per line of the metrics file.
SAMPLED_WEIGHTS = 512
# Guess: after so many steps in a row without a finite gradient, training does not recover.
MAX_LOST_STEPS = 50

logger = logging.getLogger(__name__)


def learning_rate(run: RunConfig, step: int) -> float:
    """The inner learning rate at a step of the run: linear warm-up, then cosine; constant if the run has no end."""
    if step < run.warmup_steps:
        return run.lr * (step + 1) / run.warmup_steps
    if run.total_steps == 0:
        return run.lr
    share_done = min(1.0, (step - run.warmup_steps) / max(1, run.total_steps - run.warmup_steps))
    return run.lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * share_done)))


def choose_device(name: str) -> torch.device:
    """Return the torch device called `name`; "auto" is the first CUDA GPU, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: not a device of torch; give cpu, cuda, cuda:1, mps …") from error
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: cannot be used ({reason}); give cpu, or leave it out") from error
    return device


class Trainer:
    """A model with its optimizer and its text windows. Owns the optimizer; the caller owns the model."""

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        run: RunConfig,
        *,
        batch_size: int,
        seed: int,
        spans: NDArray[np.int64] | None = None,
    ) -> None:
        """
        Args:
            model: maps int64 tokens (B, T) to logits (B, T, V); already on its device.
            corpus: text to train and to evaluate on.
            run: gives learning rate, warm-up, length and weight decay.
            batch_size: windows of text per step.
            seed: seeds this peer's windows and torch's global generator (dropout).
            spans: int64 (spans, 2), ranges of the training text to draw windows from (`Shards.spans`); None for all.

        Raises:
            ConfigError: the text, or every span of it, is shorter than one window.
        """
        self.model = model
        self.run = run
        self._device = next(model.parameters()).device
        context = context_length(model)
        self._windows = RandomWindows(corpus.training, context=context, batch_size=batch_size, seed=seed, spans=spans)
        eval_count = max(1, EVAL_TOKENS // context)
        self._eval_windows = fixed_windows(corpus.held_out, context=context, count=eval_count)
        self.optimizer = _adamw(model, run)
        self._lost_steps = 0
        torch.manual_seed(seed)

    def step(self, run_step: int) -> tuple[float, int]:
        """Take one optimizer step at the given step of the run. Returns the loss in nats and the number of tokens.

        If the gradient is not finite, the weights stay as they are. Raises ConfigError if that happened MAX_LOST_STEPS
        times in a row.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.run, run_step)
        self.model.train()
        inputs, targets = self._windows.next_batch()
        loss = self._loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_CLIP)
        if torch.isfinite(norm):
            self.optimizer.step()
            self._lost_steps = 0
        else:
            self._count_lost_step(run_step)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), inputs.numel()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats on the fixed windows of held-out text."""
        self.model.eval()
        batches = zip(*(torch.split(part, EVAL_BATCH) for part in self._eval_windows), strict=True)
        total = sum(self._loss(inputs, targets).item() * len(inputs) for inputs, targets in batches)
        return total / len(self._eval_windows[0])

    @torch.no_grad()
    def sample_weights(self) -> list[float]:
        """SAMPLED_WEIGHTS weights, to six digits, at the same coordinates on every peer (for the live correlation)."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        starts = np.cumsum([0, *(parameter.numel() for parameter in parameters)])
        chosen = sample_indices(self.run.run_seed, int(starts[-1]), SAMPLED_WEIGHTS)
        values: list[float] = []
        for parameter, start in zip(parameters, starts[:-1], strict=True):
            inside = chosen[(chosen >= start) & (chosen < start + parameter.numel())] - start
            values += parameter.reshape(-1)[torch.from_numpy(inside).to(self._device)].tolist()
        return [float(f"{value:.6g}") for value in values]

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on except the weights and the random state of a GPU."""
        state = {"optimizer": self.optimizer.state_dict(), "windows": self._windows.state_dict()}
        return {**state, "torch_rng": torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._windows.load_state_dict(state["windows"])
        torch.set_rng_state(state["torch_rng"])

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of int64 (B, T) inputs and targets."""
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        with _autocast(self._device):
            logits = self.model(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _count_lost_step(self, run_step: int) -> None:
        self._lost_steps += 1
        logger.warning("step %d: the gradient is not finite; update skipped", run_step)
        if self._lost_steps == MAX_LOST_STEPS:
            raise ConfigError(
                f"lr = {self.run.lr}: the gradient was not finite for {MAX_LOST_STEPS} steps in a row; "
                f"start a run with a lower --lr"
            )


def _adamw(model: nn.Module, run: RunConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on matrices only (not on biases and norms)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": run.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all tensors: otherwise, on a CPU, a third of the demo model's step is Python overhead.
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=run.lr, betas=BETAS, fused=fused)


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on GPUs that support it. Not on CPUs, most of which emulate it slowly."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
