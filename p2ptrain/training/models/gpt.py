"""GPT-2 ("Language Models are Unsupervised Multitask Learners", 2019), after Karpathy's nanoGPT.

Pre-norm blocks, learned positions, and one table as token embedding and output head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.training.models.cache import KeyValueCache, attend

# GPT-2's, and the default of torch.
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        layers, heads: number of blocks, and attention heads in each.
        width: width of the residual stream.
        context: longest sequence, in tokens.
        head_size: width of a head's keys and values; 0 divides `width` among the heads, as GPT-2 does. Models of
            Chinchilla's family, such as DiLoCo's 60M and 150M, have wider ones: 16 heads of 64 on a width of 896.
    """

    vocab_size: int
    layers: int
    heads: int
    width: int
    context: int
    head_size: int = 0

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a `GPT` of this shape, computed without building it."""
        width, attention = self.width, self.attention_width
        block = 4 * width + 3 * attention * (width + 1) + width * (attention + 1) + width * (8 * width + 5)
        return (self.vocab_size + self.context + 2) * width + self.layers * block


class GPT(nn.Module):
    """Maps tokens to the logits of each next token. Attribute `context` is the longest sequence it takes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        # As in GPT-2: 0.02 everywhere, and less for the 2 * layers matrices that add to the residual stream.
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                residual = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """int64 (batch, time) -> logits (batch, time, vocab_size), time at most `context` with what the cache keeps."""
        # The head uses the embedding table directly, so there is one parameter and no alias of it.
        return functional.linear(self.features(tokens, cache), self.token_embedding.weight)

    def features(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """int64 (batch, time) -> the last layer's normalised output (batch, time, width), the input of the head."""
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, width)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.final_norm(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised copy and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=NORM_EPS)
        self.mlp = MLP(config.width)

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + self.attention(self.attention_norm(x), cache, layer)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.attention_width)
        self.project = nn.Linear(config.attention_width, config.width)

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, head size) each
        mixed = attend(query, key, value, cache, layer)
        return self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with GELU between them; the hidden layer is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        return self.project(functional.gelu(self.expand(x), approximate="tanh"))  # type: ignore[no-any-return]
