"""Well-formed messages: plausible ones of every kind, and ones with each field in turn at its extremes."""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.frames import MAX_HEADER_BYTES
from p2ptrain.protocol.wire.messages import Attempt, Head, Message, Record, pack, unpack

# What a link itself makes, and what ends it.
ENDS_A_LINK = (messages.Hello, messages.Leave)
NUMBERS = (0, 1, -1, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 1e300, -1e300, 5e-324)
TEXTS = (
    "",
    "x" * 4096,
    "x" * 512,
    "\x1b[2J\x1b[31m\r\nforged: line\x07",
    "\N{RIGHT-TO-LEFT OVERRIDE}\0\x85",
    "x-y",
    "-",
)
BYTES = (b"", b"\xff" * 2048, b"\0" * 32)
MANY = (0, 1, 4096)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What anybody linked to a peer knows: its head and who trains."""

    head: Head
    peers: tuple[str, ...]
    num_slots: int = 0


def plausible(kind: Any, facts: Facts, rng: random.Random, field: str = "") -> Any:
    """A value of a message's type that a peer might send now."""
    head = facts.head
    known: dict[str, Any] = {
        "genesis": head.genesis, "lineage": head.lineage, "round": head.round + rng.choice((0, 1, 1, 1)),
        "parent_hash": head.state_hash, "state_hash": head.state_hash, "run_step": head.run_step + 20,
        "tokens_total": head.tokens_total + 320, "outer_optimizer": "nesterov", "selection": "cyclic",
        "num_slots": facts.num_slots, "slot": 0, "slot_count": 1, "cycle": 0, "sent_s": 1.0, "echo_s": 0.0,
    }  # fmt: skip
    if field in known:
        return known[field]
    if kind is Record and head.record is not None:
        return msgspec.structs.replace(
            head.record, lineage=head.lineage, round=head.round + 1, parent_hash=head.state_hash,
            run_step=head.run_step + 20, tokens_total=head.tokens_total + 320,
        )  # fmt: skip
    if kind is Attempt:
        leader = rng.choice(facts.peers)
        return Attempt(rng.choice((1, 2, 1000)), leader, f"{leader}.1")
    if kind is Head:
        return head
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return plausible(inner[0], facts, rng, field)
    if isinstance(kind, types.UnionType):
        return rng.choice((None, plausible(inner[0], facts, rng)))
    if origin is tuple:
        hints = (inner[0],) * rng.randrange(3) if inner[-1] is Ellipsis else inner
        return tuple(plausible(hint, facts, rng) for hint in hints)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(plausible(hint, facts, rng, name) for name, hint in fields_of(kind)))
    simple: dict[Any, Any] = {
        str: rng.choice((*facts.peers, "head", "part", "record", "chunk", "history", "events", "")), bytes: b"\0" * 32,
        int: rng.choice((0, 1, 7, head.round + 1)), float: rng.choice((0.0, 0.5, 2.0)), bool: rng.random() < 0.5,
    }  # fmt: skip
    return simple[kind]


@cache
def fields_of(kind: type[Any]) -> list[tuple[str, Any]]:
    """The fields of a message in their order, with their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(name, hints[name]) for name in kind.__struct_fields__]


def extremes(kind: Any, facts: Facts, rng: random.Random) -> Iterator[Any]:
    """The extreme values of a type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        yield from extremes(inner[0], facts, rng)
    elif isinstance(kind, types.UnionType):
        yield None
        yield from extremes(inner[0], facts, rng)
    elif origin is tuple and inner[-1] is not Ellipsis:
        for at, hint in enumerate(inner):
            for value in extremes(hint, facts, rng):
                rest = [plausible(other, facts, rng) for other in inner]
                yield (*rest[:at], value, *rest[at + 1 :])
    elif origin is tuple:
        one = plausible(inner[0], facts, rng)
        yield from ((one,) * count for count in MANY)
        yield from ((value,) for value in extremes(inner[0], facts, rng))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from with_extremes(kind, facts, rng)
    else:
        yield from {int: NUMBERS, float: FLOATS, str: TEXTS, bytes: BYTES, bool: (False, True)}[kind]


def with_extremes(kind: type[Any], facts: Facts, rng: random.Random) -> Iterator[Any]:
    """Messages of a kind, each with one field, also of what it holds, at one extreme."""
    for name, hint in fields_of(kind):
        for value in extremes(hint, facts, rng):
            yield msgspec.structs.replace(plausible(kind, facts, rng), **{name: value})


def an_extreme(kind: Any, facts: Facts, rng: random.Random) -> Any:
    """A value of a type, with one field at an extreme if it is a message; at random, and cheaper than all of them."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated or isinstance(kind, types.UnionType):
        return an_extreme(inner[0], facts, rng)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        message = plausible(kind, facts, rng)
        if fields := fields_of(kind):
            name, hint = rng.choice(fields)
            message = msgspec.structs.replace(message, **{name: an_extreme(hint, facts, rng)})
        return message
    if origin is tuple and inner[-1] is Ellipsis and rng.random() < 0.5:
        return (an_extreme(inner[0], facts, rng),)
    return rng.choice(list(extremes(kind, facts, rng)))


def well_formed(kind: type[Message], facts: Facts, rng: random.Random) -> Iterator[Message]:
    """Those that a receiver can unpack; others are the fuzzer's."""
    for message in with_extremes(kind, facts, rng):
        data = pack(message)
        try:
            unpack(kind, data)
        except WireError:
            continue
        if len(data) <= MAX_HEADER_BYTES:
            yield message
