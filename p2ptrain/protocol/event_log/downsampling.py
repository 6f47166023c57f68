"""Bounds the length of a history by merging neighbours, so that it still covers the whole time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def coalesce(items: Sequence[T], goal: int, weight: Callable[[T], int], merge: Callable[[T, T], T]) -> list[T]:
    """Merge neighbours, the lightest first, until at most `goal` items of about equal weight are left.

    Args:
        items: in order of time.
        goal: at least 1.
        weight: number of original items in an item.
        merge: merges an older and a newer item; weights add up.
    """
    kept, limit = list(items), 2
    while len(kept) > goal:
        merged: list[T] = []
        for item in kept:
            if merged and weight(merged[-1]) + weight(item) <= limit:
                merged[-1] = merge(merged[-1], item)
            else:
                merged.append(item)
        kept, limit = merged, 2 * limit
    return kept
