"""Peer ids as text, and as the bytes that they stand for."""

from __future__ import annotations

import re

# Bitcoin's alphabet.
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# Base58 of a multihash: of an RSA key's SHA-256, or of a shorter key itself.
_PEER_ID = re.compile(f"Qm[{_BASE58}]{{44}}|1[{_BASE58}]{{51,52}}")


def is_peer_id(text: str) -> bool:
    """Whether a text has the form of a peer id."""
    return _PEER_ID.fullmatch(text) is not None


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
