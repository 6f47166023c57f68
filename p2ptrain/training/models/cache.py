"""Keeps the keys and values of earlier tokens, so that each further token of a text costs one position, not all."""

from __future__ import annotations

import torch
from torch.nn import functional


class KeyValueCache:
    """The keys and values of one batch of texts, in each layer of a model."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def length(self) -> int:
        """The number of tokens that it keeps."""
        return self._kept[0][0].shape[2] if self._kept else 0

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of further tokens, (batch, heads, tokens, head size) each. Returns all of them."""
        if layer == len(self._kept):
            self._kept.append((key, value))
        else:
            before_key, before_value = self._kept[layer]
            self._kept[layer] = torch.cat([before_key, key], dim=2), torch.cat([before_value, value], dim=2)
        return self._kept[layer]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KeyValueCache | None, layer: int
) -> torch.Tensor:
    """Causal attention, (batch, heads, time, head size) each. With a cache, also to the earlier tokens that it keeps.

    If the cache is not empty, `query` must be of one token.
    """
    if cache is not None:
        key, value = cache.extend(layer, key, value)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] == key.shape[2])
