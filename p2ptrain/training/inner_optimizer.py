"""The inner optimizer: AdamW, or Muon for hidden matrices with AdamW for the rest; and the schedule of their rates.

Muon (Jordan et al., 2024) as torch has it: momentum 0.95, Nesterov, Newton-Schulz, and updates scaled to the size of
AdamW's. Inside DiLoCo: MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.models import GPT, Llama
from p2ptrain.training.parallel import own_part

# DiLoCo, table 5.
BETA1 = 0.9
MUON_MOMENTUM = 0.95
# For a run that does not state muon_lr; the command line states it. 4 to 8 times AdamW's rate were alike in short runs
# (simulated, 156 thousand parameters).
MUON_TIMES = 4.0
# Cosine to 10 %: as in nanoGPT.
FINAL_LR_SHARE = 0.1
# Share of a run with schedule wsd in which the rate decays to zero (MiniCPM, arXiv 2404.06395: 10 %; modded-nanogpt:
# 40 %).
DECAY_SHARE = 0.2


def lr_share(run: RunConfig, step: int) -> float:
    """The share of the peak learning rate at a step of the run. It depends on the run's step, not on the peer's.

    It warms up linearly. Then it falls to 10 % as a cosine, or it is constant, and with `wsd` falls linearly to zero in
    the last fifth. In a run without end it stays at its peak.
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
        adamw: trains all parameters, or those that Muon does not train.
        muon: trains the hidden matrices; None without Muon.
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
        # By their names in a checkpoint, each with its peak learning rate.
        self._all: dict[str, tuple[torch.optim.Optimizer, float]] = {"optimizer": (self.adamw, run.lr)}
        self.muon: torch.optim.Optimizer | None = None
        if hidden:
            lr, decay = run.muon_lr or MUON_TIMES * run.lr, run.weight_decay
            self.muon = torch.optim.Muon(
                hidden, lr=lr, weight_decay=decay, momentum=MUON_MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
            )
            self._all["muon"] = self.muon, lr

    def step(self, share: float) -> None:
        """Take a step at this share of the peak learning rates.

        The first step makes the state. If it fails there is none: no checkpoint could continue from a part of it.
        """
        is_first = not any(optimizer.state for optimizer, _ in self._all.values())
        try:
            for optimizer, peak in self._all.values():
                for group in optimizer.param_groups:
                    group["lr"] = share * peak
                optimizer.step()
        except RuntimeError:
            if is_first:
                for optimizer, _ in self._all.values():
                    optimizer.state.clear()
            raise

    def zero_grad(self) -> None:
        for optimizer, _ in self._all.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, (optimizer, _) in self._all.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, (optimizer, _) in self._all.items():
            optimizer.load_state_dict(own_part(state[name], optimizer))


def hidden_matrices(model: nn.Module, vocab_size: int) -> list[nn.Parameter]:
    """The trainable matrices that Muon trains: all except embeddings and the head.

    In models of users the last linear layer counts as the head, if it has at least `vocab_size` outputs.
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
