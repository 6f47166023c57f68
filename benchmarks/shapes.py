"""The measured models: the parameters of GPTs without a forward pass, since only the exchange is measured."""

from __future__ import annotations

import torch
from torch import nn


class GPTParameters(nn.Module):
    """The parameters of a GPT-2-like model, without a forward pass; the head is tied to the token embedding.

    Args:
        layers: number of transformer blocks, of 12 tensors each.
        width: size of the residual stream.
        vocabulary: number of tokens.
        context: number of positions.
        seed: seeds the initial values, normal with a standard deviation of 0.02 as in GPT-2.
    """

    def __init__(self, *, layers: int, width: int, vocabulary: int, context: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in _gpt_shapes(layers, width, vocabulary, context):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).mul_(0.02)))

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def gpt2_124m(seed: int = 0) -> GPTParameters:
    """GPT-2 small: 124,439,808 parameters in 148 tensors."""
    return GPTParameters(layers=12, width=768, vocabulary=50257, context=1024, seed=seed)


def gpt_25m(seed: int = 0) -> GPTParameters:
    """A byte-level GPT: 25,481,216 parameters in 100 tensors."""
    return GPTParameters(layers=8, width=512, vocabulary=256, context=256, seed=seed)


def gpt_100m(seed: int = 0) -> GPTParameters:
    """A byte-level GPT: 101,001,216 parameters."""
    return GPTParameters(layers=14, width=768, vocabulary=256, context=2048, seed=seed)


def gpt_350m(seed: int = 0) -> GPTParameters:
    """GPT-2 medium: 354,823,168 parameters."""
    return GPTParameters(layers=24, width=1024, vocabulary=50257, context=1024, seed=seed)


def _gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embedding", (vocabulary, width)),
        ("position_embedding", (context, width)),
    ]
    for layer in range(layers):
        block: list[tuple[str, tuple[int, ...]]] = [
            ("attention_norm_weight", (width,)),
            ("attention_norm_bias", (width,)),
            ("attention_in_weight", (3 * width, width)),
            ("attention_in_bias", (3 * width,)),
            ("attention_out_weight", (width, width)),
            ("attention_out_bias", (width,)),
            ("mlp_norm_weight", (width,)),
            ("mlp_norm_bias", (width,)),
            ("mlp_in_weight", (4 * width, width)),
            ("mlp_in_bias", (4 * width,)),
            ("mlp_out_weight", (width, 4 * width)),
            ("mlp_out_bias", (width,)),
        ]
        shapes += [(f"block{layer}_{name}", shape) for name, shape in block]
    return [*shapes, ("norm_weight", (width,)), ("norm_bias", (width,))]
