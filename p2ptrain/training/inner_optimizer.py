"""The inner optimizer: AdamW, or Muon for hidden matrices with AdamW for the rest; and the schedule of their rates.

Muon (Jordan et al., 2024) as torch has it: momentum 0.95, Nesterov, Newton-Schulz, and updates scaled to the size of
AdamW's. Inside DiLoCo: MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.fsdp import own_part
from p2ptrain.training.models import GPT, Llama

# DiLoCo, table 5.
BETA1 = 0.9
MUON_MOMENTUM = 0.95
# Of a run that does not state muon_lr; the command line states it. From 4 to 8 times AdamW's rate were alike in short
# runs (simulated, 156 thousand parameters).
MUON_TIMES = 4.0
# Cosine to 10 %: as in nanoGPT.
FINAL_LR_SHARE = 0.1
# Of a run with schedule wsd: its linear decay to zero (MiniCPM, arXiv 2404.06395, has 10 %; modded-nanogpt 40 %).
DECAY_SHARE = 0.2


def lr_share(run: RunConfig, step: int) -> float:
    """The share of the peak learning rate at a step of the run. It depends on the run's step, not on the peer's.

    Linear warm-up; then cosine to 10 %; or constant, with `wsd` until a linear decay to zero in the last fifth. A run
    without end stays at its peak.
    """
    if step < run.warmup_steps:
        return (step + 1) / run.warmup_steps
    if run.total_steps == 0 or run.schedule == "constant":
        return 1.0
    if run.schedule == "wsd":
        left = run.total_steps - step
        return min(1.0, max(0.0, left / max(1.0, DECAY_SHARE * run.total_steps)))
    share_done = min(1.0, (step - run.warmup_steps) / max(1, run.total_steps - run.warmup_steps))
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * share_done))


class InnerOptimizer:
    """The optimizers of one model.

    Attributes:
        adamw: of all parameters, or of those that Muon does not have.
        muon: of hidden matrices; None without Muon.
    """

    def __init__(self, model: nn.Module, run: RunConfig) -> None:
        """Raises ConfigError if this version of torch has no Muon, or the model has no matrix for it."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hidden: list[nn.Parameter] = []
        if run.inner_optimizer == "muon":
            hidden = hidden_matrices(model, run.vocab_size)
            if not hasattr(torch.optim, "Muon"):
                raise ConfigError(
                    f"inner_optimizer = 'muon': torch {torch.__version__} has no Muon; install torch 2.9 or newer, or "
                    f"join a run with adamw"
                )
            if not hidden:
                raise ConfigError("inner_optimizer = 'muon': the model has no hidden matrices; start a run with adamw")
        of_muon = set(map(id, hidden))
        rest = [parameter for parameter in trainable if id(parameter) not in of_muon]
        groups = [
            # Weight decay on matrices only (not on biases and norms).
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": run.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        # One kernel for all tensors: otherwise, on a CPU, a third of the demo model's step is Python overhead.
        fused = trainable[0].device.type in ("cpu", "cuda")
        self.adamw = torch.optim.AdamW(groups, lr=run.lr, betas=(BETA1, run.beta2), fused=fused)
        self.muon: torch.optim.Optimizer | None = None
        self._peaks = {id(self.adamw): run.lr}
        if hidden:
            peak = run.muon_lr or MUON_TIMES * run.lr
            self.muon = torch.optim.Muon(
                hidden,
                lr=peak,
                momentum=MUON_MOMENTUM,
                nesterov=True,
                weight_decay=run.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._peaks[id(self.muon)] = peak

    def step(self, share: float) -> None:
        """Take a step at this share of the peak learning rates."""
        for optimizer in self._all():
            for group in optimizer.param_groups:
                group["lr"] = share * self._peaks[id(optimizer)]
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._all():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        states = {"optimizer": self.adamw.state_dict()}
        return states if self.muon is None else {**states, "muon": self.muon.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adamw.load_state_dict(own_part(state["optimizer"], self.adamw))
        if self.muon is not None:
            self.muon.load_state_dict(own_part(state["muon"], self.muon))

    def _all(self) -> Iterator[torch.optim.Optimizer]:
        yield self.adamw
        if self.muon is not None:
            yield self.muon


def hidden_matrices(model: nn.Module, vocab_size: int) -> list[nn.Parameter]:
    """The trainable matrices that Muon is for: all but embeddings and the head.

    In models of users the head is taken to be the last linear layer, if it has at least `vocab_size` outputs.
    """
    excluded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if linear and not isinstance(model, (GPT, Llama)):
        *_, last = linear.values()
        if last.out_features >= vocab_size:
            excluded.add(id(last.weight))
    if "lm_head" in linear:
        excluded.add(id(linear["lm_head"].weight))
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]
