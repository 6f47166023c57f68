"""Peer ids as text, and as the bytes that they stand for."""

from __future__ import annotations

import re

# Bitcoin's alphabet.
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# Base58 of a multihash: of an RSA key's SHA-256, or of a shorter key itself.
_PEER_ID = re.compile(f"Qm[{_BASE58}]{{44}}|1[{_BASE58}]{{51,52}}")


def is_peer_id(text: str) -> bool:
    """Whether a text is a peer id: a multihash."""
    if _PEER_ID.fullmatch(text) is None:
        return False
    data = from_base58(text)
    return (data[:2] == b"\x12\x20" and len(data) == 34) or (data[0] == 0 and data[1] == len(data) - 2)


def from_base58(text: str) -> bytes:
    """The bytes of a base58 text. Raises ValueError."""
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    data = number.to_bytes((number.bit_length() + 7) // 8, "big")
    data = bytes(len(text) - len(text.lstrip("1"))) + data
    if not 0 < len(data) <= 64:
        raise ValueError("not a peer id")
    return data


def to_base58(data: bytes) -> str:
    """The base58 text of these bytes. Raises ValueError."""
    if not 0 < len(data) <= 64:
        raise ValueError("not a peer id")
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text
