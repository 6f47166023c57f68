"""Frames: round trips, and untrusted bytes are refused before large allocations."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    WIRE_VERSION,
    Prefix,
    decode_body,
    decode_prefix,
    encode_frame,
)
from p2ptrain.protocol.wire.messages import KINDS, Ack, Answer, Leave, Message, pack

PREFIX = struct.Struct("!BBBxIIIQ")
ANSWER = Answer(5, True, "chunk")
ANSWER_KIND = next(number for number, kind in KINDS.items() if kind is Answer)
COMPRESSED, BULK = 1, 2


def decode(frame: bytes) -> tuple[Prefix, Message, bytes]:
    prefix = decode_prefix(frame[:PREFIX_BYTES])
    return prefix, *decode_body(prefix, frame[PREFIX_BYTES:])


def frame_of(packed: bytes, raw_bytes: int) -> bytes:
    """A frame with a hand-made compressed payload that claims to hold `raw_bytes`."""
    header = pack(ANSWER)
    return PREFIX.pack(WIRE_VERSION, ANSWER_KIND, COMPRESSED, len(header), len(packed), raw_bytes, 0) + header + packed


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 1 MB is allocated meanwhile, whatever the bytes declare."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 1_000_000


@settings(max_examples=60, derandomize=True)
@given(
    payload=st.binary(max_size=3000) | st.integers(1, 40_000).map(bytes),
    acked=st.integers(0, 2**64 - 1),
    bulk=st.booleans(),
    compress=st.booleans(),
)
def test_a_frame_comes_back_as_it_was(payload: bytes, acked: int, bulk: bool, compress: bool) -> None:
    frame = encode_frame(ANSWER, payload, acked_bytes=acked, bulk=bulk, compress=compress)
    prefix, message, received = decode(frame)
    assert (message, received) == (ANSWER, payload)
    assert (prefix.acked_bytes, prefix.bulk, prefix.raw_payload_bytes) == (acked, bulk, len(payload))
    assert PREFIX_BYTES + prefix.body_bytes == len(frame)
    assert len(frame) <= PREFIX_BYTES + len(pack(ANSWER)) + len(payload)


def test_compression_is_kept_where_it_pays() -> None:
    zeros, noise = bytes(100_000), random.Random(0).randbytes(100_000)
    assert len(encode_frame(ANSWER, zeros, compress=True)) < 200
    assert decode_prefix(encode_frame(ANSWER, zeros, compress=True)[:PREFIX_BYTES]).compressed
    assert not decode_prefix(encode_frame(ANSWER, zeros)[:PREFIX_BYTES]).compressed
    assert not decode_prefix(encode_frame(ANSWER, noise, compress=True)[:PREFIX_BYTES]).compressed


def test_the_largest_payload_fits_and_no_larger() -> None:
    largest = memoryview(bytes(MAX_PAYLOAD_BYTES))
    assert decode(encode_frame(ANSWER, largest))[2] == largest
    with pytest.raises(AssertionError, match="payload"):
        encode_frame(ANSWER, bytes(MAX_PAYLOAD_BYTES + 1))


def test_the_first_bytes_of_version_9() -> None:
    """Frames of another build of this version must be understood: these bytes never change."""
    leave = "09 04 00 00  00000005 00000000 00000000  0000000000000102  91 a3 627965"
    assert encode_frame(Leave("bye"), acked_bytes=258) == bytes.fromhex(leave)
    ack = "09 03 02 00  00000001 00000000 00000000  0000000000000000  90"
    assert encode_frame(Ack(), bulk=True) == bytes.fromhex(ack)


# --- hostile prefixes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        ((0, 3, 0, 1, 0, 0, 0), "version 0"),
        ((1, 3, 0, 1, 0, 0, 0), "version 1"),
        ((WIRE_VERSION, 0, 0, 1, 0, 0, 0), "kind 0"),
        ((WIRE_VERSION, 255, 0, 1, 0, 0, 0), "kind 255"),
        ((WIRE_VERSION, 3, 4, 1, 0, 0, 0), "flags 4"),
        ((WIRE_VERSION, 3, 128, 1, 0, 0, 0), "flags 128"),
        ((WIRE_VERSION, 3, 0, MAX_HEADER_BYTES + 1, 0, 0, 0), "header of"),
        ((WIRE_VERSION, 3, 0, 2**32 - 1, 0, 0, 0), "header of"),
        ((WIRE_VERSION, 3, 0, 1, MAX_PAYLOAD_BYTES + 1, MAX_PAYLOAD_BYTES + 1, 0), "payload of"),
        ((WIRE_VERSION, 3, COMPRESSED, 1, 2**32 - 1, 10, 0), "payload of"),
        ((WIRE_VERSION, 3, COMPRESSED, 1, 1000, 50_000_000, 0), "payload of"),
        ((WIRE_VERSION, 3, 0, 1, 1000, 1001, 0), "two sizes"),
        ((WIRE_VERSION, 3, BULK, 1, 0, 1, 0), "two sizes"),
    ],
)
def test_a_hostile_prefix_is_refused_before_anything_is_read(
    prefix: tuple[int, ...], complaint: str, little_memory: None
) -> None:
    with pytest.raises(WireError, match=complaint):
        decode_prefix(PREFIX.pack(*prefix))


@settings(max_examples=200, derandomize=True)
@given(kind=st.sampled_from(sorted(KINDS)), flags=st.integers(0, 3), sizes=st.tuples(*3 * [st.integers(0, 2**23)]))
def test_a_random_prefix_is_refused_or_within_bounds(kind: int, flags: int, sizes: tuple[int, int, int]) -> None:
    data = PREFIX.pack(WIRE_VERSION, kind, flags, *sizes, 0)
    try:
        prefix = decode_prefix(data)
    except WireError:
        return
    assert prefix.body_bytes <= MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
    assert prefix.raw_payload_bytes <= MAX_PAYLOAD_BYTES


# --- hostile payloads --------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """50 MB of zeros in a few kB, declared in its own frame."""
    return zstandard.ZstdCompressor().compress(bytes(50_000_000))


def silent_bomb() -> bytes:
    """The same without a declared size."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))


def lying_bomb(claimed: int) -> bytes:
    """The same, declaring `claimed` bytes in its own frame."""
    packed = bytearray(bomb())
    # Magic number, then a descriptor whose top bits (10) say: four bytes of content size, after one byte of window.
    assert packed[4] >> 6 == 2
    single_segment = packed[4] >> 5 & 1
    position = 5 if single_segment else 6
    packed[position : position + 4] = struct.pack("<I", claimed)
    return bytes(packed)


@pytest.mark.parametrize("raw_bytes", [0, 1, 1000, MAX_PAYLOAD_BYTES])
@pytest.mark.parametrize("make", [bomb, silent_bomb], ids=["declared", "undeclared"])
def test_a_zstd_bomb_is_refused(make: object, raw_bytes: int) -> None:
    frame = frame_of(make(), raw_bytes)  # type: ignore[operator]
    assert len(frame) < 10_000
    refuse(frame)


@pytest.mark.parametrize("claimed", [1, 1000, 500_000])
def test_a_zstd_frame_that_lies_about_itself_is_refused(claimed: int) -> None:
    packed = lying_bomb(claimed)
    assert zstandard.get_frame_parameters(packed).content_size == claimed
    refuse(frame_of(packed, claimed))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        random.Random(1).randbytes(500),
        zstandard.ZstdCompressor().compress(bytes(1000))[:-3],
        struct.pack("<II", 0x184D2A50, 1000) + bytes(1000),
        b"\x28\xb5\x2f\xfd\x03" + bytes(100),
    ],
    ids=["nothing", "magic only", "noise", "truncated", "skippable", "wants a dictionary"],
)
def test_a_payload_that_is_no_zstd_is_refused(packed: bytes) -> None:
    refuse(frame_of(packed, 1000))


def refuse(frame: bytes) -> None:
    """Decoding raises WireError and allocates less than 1 MB on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=150, derandomize=True)
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_well_formed(data: st.DataObject) -> None:
    frame = bytearray(encode_frame(ANSWER, bytes(range(256)) * 20, compress=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(frame) - 1))
        frame[bit // 8] ^= 1 << bit % 8
    try:
        prefix = decode_prefix(bytes(frame[:PREFIX_BYTES]))
        # As a reader would: take what is declared, where that much has come.
        body = bytes(frame[PREFIX_BYTES : PREFIX_BYTES + prefix.body_bytes])
        if len(body) < prefix.body_bytes:
            return
        message, payload = decode_body(prefix, body)
    except WireError:
        return
    assert type(message) is KINDS[prefix.kind]
    assert len(payload) == prefix.raw_payload_bytes
