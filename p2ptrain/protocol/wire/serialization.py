"""Messages to msgpack and back.

Decoding checks the number and type of all fields, limits the length of strings and lists, and refuses non-finite
floats.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any

import msgpack

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import KINDS, Head, Message, Record

MAX_STRING = 4096
MAX_LIST = 4096


def to_header(message: Message) -> bytes:
    """Msgpack of the field values in their order."""
    return pack_value(message)


def from_header(kind: int, header: bytes) -> Message:
    """Rebuild a message from untrusted bytes. Raises WireError."""
    return _unpack(KINDS[kind], _unpack_bytes(header))  # type: ignore[no-any-return]


def pack_value(value: Any) -> bytes:
    """Canonical bytes of one message part, for hashing."""
    return msgpack.packb(_pack(value), use_bin_type=True)  # type: ignore[no-any-return]


def _pack(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [_pack(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_pack(item) for item in value]
    return value


def _unpack_bytes(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, max_str_len=MAX_STRING, max_bin_len=MAX_STRING,
            max_array_len=MAX_LIST, max_map_len=0, max_ext_len=0,
        )  # fmt: skip
    except Exception as error:  # msgpack raises several unrelated types on bad input
        raise WireError(f"bad header: {type(error).__name__}") from None


def unpack_head(data: bytes) -> Head:
    """Rebuild a Head from untrusted bytes. Raises WireError."""
    return _unpack(Head, _unpack_bytes(data))  # type: ignore[no-any-return]


def unpack_record(data: bytes) -> Record:
    """Rebuild a Record from untrusted bytes. Raises WireError."""
    return _unpack(Record, _unpack_bytes(data))  # type: ignore[no-any-return]


@cache
def _fields(cls: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def _unpack(expected: Any, value: Any) -> Any:
    if expected is float:
        if type(value) is int and abs(value) < 2**53:
            return float(value)
        if type(value) is not float or not math.isfinite(value):
            raise WireError("expected a finite number")
        return value
    if expected in (int, str, bool):
        if type(value) is not expected or (expected is int and not -(2**63) <= value < 2**63):
            raise WireError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value
    origin = typing.get_origin(expected)
    if origin is tuple:
        return _unpack_tuple(typing.get_args(expected), value)
    if origin is types.UnionType:
        inner = next(option for option in typing.get_args(expected) if option is not type(None))
        return None if value is None else _unpack(inner, value)
    fields = _fields(expected)
    if not isinstance(value, list) or len(value) != len(fields):
        raise WireError(f"bad {expected.__name__}")
    return expected(*(_unpack(kind, item) for (_, kind), item in zip(fields, value, strict=True)))


def _unpack_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"expected a list, got {type(value).__name__}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_unpack(kinds[0], item) for item in value)
    if len(value) != len(kinds):
        raise WireError(f"expected {len(kinds)} values, got {len(value)}")
    return tuple(_unpack(kind, item) for kind, item in zip(kinds, value, strict=True))
