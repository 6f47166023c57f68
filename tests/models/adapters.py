"""Adapters of peft on a small language model: the base is frozen, and only the adapter is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import peft
import torch
from peft import PeftConfig, TaskType
from torch import nn

from tests.models import architectures
from tests.models.case import Case

BASE = "transformers llama"
TARGETS = ["q_proj", "v_proj"]

ADAPTERS: dict[str, Callable[[], PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS),
    "LoRA with a bias and the head": lambda: peft.LoraConfig(
        r=2, target_modules=TARGETS, bias="lora_only", modules_to_save=["lm_head"]
    ),
    "rsLoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, target_modules=TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
}


def base() -> nn.Module:
    """The model under the adapters, the same for all peers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return architectures.case_of(BASE).build()


def case_of(name: str) -> Case:
    """The case of an adapter of `ADAPTERS`."""
    return Case(f"peft {name}", lambda: peft.get_peft_model(base(), ADAPTERS[name]()), architectures.case_of(BASE).loss)
