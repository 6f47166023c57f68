"""Peer ids as base58 texts, and the bytes that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.settings.peer_id import from_base58, is_peer_id, to_base58


@given(data=st.binary(min_size=1, max_size=64))
def test_bytes_survive_base58_with_their_leading_zeros(data: bytes) -> None:
    assert from_base58(to_base58(data)) == data


def test_base58_is_that_of_bitcoin() -> None:
    assert to_base58(b"Hello World!") == "2NEpo7TZRRrLZSi2U"  # the example of the internet draft, section 5
    assert from_base58("11233QC4") == bytes.fromhex("0000287fb4cd")  # and another


@pytest.mark.parametrize("size", [0, 65])
def test_no_peer_id_is_empty_or_longer_than_64_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="not a peer id"):
        to_base58(bytes(size))
    with pytest.raises(ValueError, match="not a peer id"):
        from_base58("1" * size)
    for longest in (bytes(64), b"\xff" * 64):
        assert from_base58(to_base58(longest)) == longest


def test_a_peer_id_is_a_multihash() -> None:
    """Of the SHA-256 of a key, or a short key itself, with its size."""
    assert is_peer_id(to_base58(b"\x12\x20" + b"\x07" * 32))
    assert is_peer_id(to_base58(b"\x00\x24" + b"\x07" * 36))
    for wrong in (b"\x12\x21" + b"\x07" * 32, b"\x13\x20" + b"\x07" * 32, b"\x00\x25" + b"\x07" * 36, b"\x07" * 38):
        assert not is_peer_id(to_base58(wrong))
    for wrong in ("", "Qm", to_base58(b"\x12\x20" + b"\x07" * 32)[:-1] + "0", to_base58(b"\x12\x20" + b"\x07" * 33)):
        assert not is_peer_id(wrong)
