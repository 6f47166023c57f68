"""Symmetry reduction: merges states that differ only by exchanging two equivalent peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from p2ptrain.protocol.wire.messages import Commit, Head, Record

# Fields that are sorted by peer.
SORTED = {"called", "joins", "ready"}


class Renaming:
    """One exchange of names, for states that are numbers; what becomes of each number is worked out once.

    Args:
        names: the new name of each peer that gets one.
        peers: all of them, in the order of their numbers in a state.
        local_image: the number of a peer's state with the names exchanged.
        sent_image: the same for something sent.
    """

    def __init__(
        self, names: dict[str, str], peers: str, local_image: Callable[[int], int], sent_image: Callable[[int], int]
    ) -> None:
        self.names = names
        self._order = [peers.index(names.get(peer, peer)) for peer in peers]
        self._local_image = cache(local_image)
        self._sent_image = sent_image
        self._bytes: dict[tuple[int, int], int] = {}

    def locals(self, numbers: list[int]) -> list[int]:
        """The peers' numbers where each bears another's name."""
        images = [0] * len(numbers)
        for place, number in zip(self._order, numbers, strict=True):
            images[place] = self._local_image(number)
        return images

    def sent(self, sent: int) -> int:
        """The bits of everything sent, a byte at a time."""
        image, place = 0, 0
        while sent:
            if byte := sent & 255:
                part = self._bytes.get((place, byte))
                if part is None:
                    bits = (place + bit for bit in range(8) if byte & 1 << bit)
                    part = self._bytes[place, byte] = sum(1 << self._sent_image(bit) for bit in bits)
                image |= part
            sent >>= 8
            place += 8
        return image


def renamed(value: Any, names: dict[str, str]) -> Any:
    """The same with peers' names exchanged."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Head | Record):
        return value  # the same for all
    if isinstance(value, tuple):
        return tuple(renamed(item, names) for item in value)
    if isinstance(value, frozenset):
        return frozenset(renamed(item, names) for item in value)
    if isinstance(value, Commit):
        votes = sorted(renamed(value.votes, names), key=lambda vote: vote.peer_id)
        return Commit(value.record, renamed(value.attempt, names), tuple(votes))
    if isinstance(value, msgspec.Struct):
        return type(value)(*(renamed(getattr(value, name), names) for name in value.__struct_fields__))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: renamed(getattr(value, f.name), names) for f in dataclasses.fields(value)}
        for name in fields.keys() & SORTED:
            fields[name] = tuple(sorted(fields[name], key=lambda item: item if isinstance(item, str) else item[0]))
        return dataclasses.replace(value, **fields)
    return value
