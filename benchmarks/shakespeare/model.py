"""nanoGPT's model of shakespeare_char in its CPU setting: `--model benchmarks.shakespeare.model:nanogpt_cpu`.

4 layers, 4 heads, 128 wide, 64 characters. nanoGPT leaves out the biases, and our GPT has them: 5,760 of 809,856
parameters.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import nn

from p2ptrain.training.models import GPT, GPTConfig

# Set by the benchmark: training begins when this file exists, so that no peer is ahead of those that start a second
# later. Without the variable, nothing waits.
GATE_VARIABLE = "SHAKESPEARE_GATE"
POLL_S = 0.05


def nanogpt_cpu(vocab_size: int) -> nn.Module:
    """The model, with random weights."""
    model = GPT(GPTConfig(vocab_size=vocab_size, layers=4, heads=4, width=128, context=64))
    if gate := os.environ.get(GATE_VARIABLE):
        _hold_first_step(model, Path(gate))
    return model


def _hold_first_step(model: nn.Module, gate: Path) -> None:
    def wait(module: nn.Module, arguments: object) -> None:
        if module.training:
            while not gate.exists():
                time.sleep(POLL_S)
            hook.remove()

    hook = model.register_forward_pre_hook(wait)
