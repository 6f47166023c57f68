"""A decoder of Llama's kind: rotary positions, RMSNorm before each part, SwiGLU, no biases; optionally QK-norm.

Weights have the names and shapes of transformers' LlamaForCausalLM, or of Qwen3ForCausalLM with normalised queries and
keys, so that `p2ptrain export` only has to write them. Sources: Llama (arXiv 2302.13971), QK-norm (arXiv 2302.05442).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.training.models.cache import KeyValueCache, attend

ROPE_THETA = 10_000.0
RMS_EPS = 1e-5


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama.

    Attributes:
        layers, heads: number of blocks, and attention heads in each; there are as many keys as queries.
        width: width of the residual stream, a multiple of 2 * heads.
        hidden: width inside the perceptrons.
        context: longest sequence, in tokens.
        tied: whether one table serves as embedding and head.
        qk_norm: whether queries and keys are normalised in each head.
    """

    vocab_size: int
    layers: int
    heads: int
    width: int
    hidden: int
    context: int
    tied: bool = True
    qk_norm: bool = True

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a `Llama` of this shape, computed without building it."""
        norms = 2 * self.width + (2 * self.head_size if self.qk_norm else 0)
        block = 4 * self.width**2 + 3 * self.width * self.hidden + norms
        tables = (1 if self.tied else 2) * self.vocab_size * self.width
        return tables + self.layers * block + self.width


class Llama(nn.Module):
    """The model. `context` is its longest sequence."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        # As in GPT-2: 0.02, and less for the 2 * layers matrices that add to the residual stream.
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if adds else 0.02)

    def forward(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """int64 (batch, time) -> logits (batch, time, vocab_size), time at most `context` with what the cache keeps."""
        head = self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
        return functional.linear(self.features(tokens, cache), head)

    def features(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """int64 (batch, time) -> the last layer's normalised output (batch, time, width), the input of the head."""
        return self.model(tokens, cache)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, blocks, and the last normalisation."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=RMS_EPS)
        angles = _angles(config.context, config.head_size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, cache: KeyValueCache | None) -> torch.Tensor:
        """(batch, time) -> (batch, time, width)."""
        start = 0 if cache is None else cache.length
        angles = Angles(self.cos[start : start + tokens.shape[1]], self.sin[start : start + tokens.shape[1]])
        x = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, cache, number)
        return self.norm(x)  # type: ignore[no-any-return]


class Angles(NamedTuple):
    """Cosines and sines of the rotary angles, (time, head size) each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Layer(nn.Module):
    """Attention, then a gated perceptron, each on a normalised copy and added to its input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=RMS_EPS)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=RMS_EPS)
        self.mlp = MLP(config.width, config.hidden)

    def forward(self, x: torch.Tensor, angles: Angles, cache: KeyValueCache | None, layer: int) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_size, eps=RMS_EPS)
            self.k_norm = nn.RMSNorm(config.head_size, eps=RMS_EPS)
        self.qk_norm = config.qk_norm

    def forward(self, x: torch.Tensor, angles: Angles, cache: KeyValueCache | None, layer: int) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        # (batch, heads, time, head size) each
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attend(_rotated(query, angles), _rotated(key, angles), value, cache, layer)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU: one linear layer gates another."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) -> the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _angles(context: int, head_size: int) -> torch.Tensor:
    """Rotary angles (context, head size), the same for the two halves of a head."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return torch.outer(torch.arange(context, dtype=torch.float32), frequencies).repeat(1, 2)


def _rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate (batch, heads, time, head size): each value of a head's first half with its partner in the second half."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin.to(x.dtype)
