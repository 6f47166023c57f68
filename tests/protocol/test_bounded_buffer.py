"""The buffer of a mean that arrives in pieces."""

from __future__ import annotations

import pytest

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.moving.pushed_means import BoundedBuffer


def test_bytes_beyond_the_bound_are_refused_and_those_before_stay() -> None:
    buffer = BoundedBuffer(5)
    buffer.extend(b"abc")
    with pytest.raises(WireError, match="more than 5 bytes"):
        buffer.extend(b"def")
    buffer.extend(b"de")
    assert (bytes(buffer.data), buffer.size_bytes) == (b"abcde", 5)


def test_bytes_that_were_read_do_not_change() -> None:
    buffer = BoundedBuffer(5)
    buffer.extend(b"abc")
    read = buffer.data
    buffer.extend(b"de")
    assert bytes(read) == b"abc"


@pytest.mark.parametrize("full", [BoundedBuffer.of(b"abc"), BoundedBuffer(3)])
def test_an_emptied_buffer_keeps_the_bound(full: BoundedBuffer) -> None:
    emptied = full.emptied()
    assert bytes(emptied.data) == b""
    emptied.extend(b"abc")
    with pytest.raises(WireError, match="more than 3 bytes"):
        emptied.extend(b"d")
