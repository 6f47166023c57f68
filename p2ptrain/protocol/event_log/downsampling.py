"""Long histories in little memory: neighbours are merged, so that what is kept still spans all of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def coalesce(items: Sequence[T], goal: int, weight: Callable[[T], int], merge: Callable[[T, T], T]) -> list[T]:
    """Merge neighbours, the lightest first, until at most `goal` are left: all end up about equally heavy.

    Args:
        items: in order of time.
        goal: at least 1.
        weight: how many original items an item stands for.
        merge: makes one of an older and a newer item; their weights add up.
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
