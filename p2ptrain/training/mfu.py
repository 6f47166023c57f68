"""Model FLOPs utilisation (MFU): the share of a GPU's peak that the model's own arithmetic takes (PaLM, appendix B).

Counted as in nanoGPT: 6 N + 12 L A T floating point operations for a token's forward and backward pass, with N
parameters in matrix products, L layers, attention of width A and windows of T tokens. Unknown for models and devices
that are not listed here: no number is better than a wrong one.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from p2ptrain.training.models import GPT, Llama, context_length
from p2ptrain.training.models.hf import CausalLM

# Peak of dense matrix products in bfloat16 with sums in float32, in operations a second, for devices whose names have
# all of these words; the first that fits counts. From the vendors' data sheets (half of what they give for sparse
# matrices) and, for GeForce, from the white papers of GA102 and Ada; the same as in nanochat's table.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200 NVL", 836e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100 HBM2e", 756e12),  # the PCIe card's name in older drivers
    ("H100", 989e12),
    ("A100", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)
# Words in the names of parts of a GPU, and of other GPUs with similar names.
_OTHERS = frozenset({"mig", "laptop", "ti", "d"})


def peak_flops(device_name: str) -> float | None:
    """Peak operations a second of a device, by its name as torch gives it; None if it is not known."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _OTHERS:
        return None
    return next((peak for name, peak in PEAK_FLOPS if set(name.lower().split()) <= words), None)


def flops_per_token(model: nn.Module) -> float | None:
    """Operations of a training step for each token; None for models of the user, and for mixtures of experts."""
    counted = sum(parameter.numel() for parameter in model.parameters())
    match model:
        case GPT():
            counted -= model.position_embedding.weight.numel()
            layers, width = model.config.layers, model.config.attention_width
        case Llama():
            counted -= 0 if model.config.tied else model.model.embed_tokens.weight.numel()
            layers, width = model.config.layers, model.config.width
        case CausalLM():
            return _of_transformers(model, counted)
        case _:
            return None
    return 6.0 * counted + 12.0 * layers * width * context_length(model)


def utilisation_of(model: nn.Module, device: torch.device) -> float | None:
    """The share of the device's peak that one token a second takes; None if it is not known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = flops_per_token(model)
    return flops / peak if flops is not None and peak is not None else None


def _of_transformers(model: CausalLM, counted: int) -> float | None:
    theirs: Any = model.lm
    config = theirs.config
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, width = (getattr(config, name, None) for name in names)
    if not (layers and heads and width) or any("expert" in name for name in config.to_dict()):
        return None
    if not config.tie_word_embeddings:
        counted -= theirs.get_input_embeddings().weight.numel()
    head_size = int(getattr(config, "head_dim", None) or width // heads)
    return 6.0 * counted + 12.0 * int(layers) * int(heads) * head_size * model.context
