"""Encode a message and its payload as a frame, and decode frames from untrusted peers.

A frame is a fixed prefix, a msgpack header (one message of `messages.py`) and a raw payload, zstd-compressed where
that pays. Decoding checks everything: sizes before memory is allocated, version, kind, the type of every header field,
and the size that a compressed payload declares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import zstandard

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import KIND_OF, KINDS, Answer, Contribution, Mean, Message, pack, unpack

WIRE_VERSION = 9
# A roster of 64 members and their parts takes a few KiB, a proposal of 64 contributors with 31 views some 90 KiB.
MAX_HEADER_BYTES = 256 * 1024
# The largest payloads are fragments of large models.
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024

# A chunk of a round has at most 264 KiB. Without this limit, a few bytes could expand to 4 MiB.
MAX_COMPRESSED_CHUNK_BYTES = 320 * 1024

_PREFIX = struct.Struct("!BBBxIIIQ")
PREFIX_BYTES = _PREFIX.size
_COMPRESSED = 1
_BULK = 2


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed part of a frame. `bulk`: under flow control; `acked_bytes`: bulk bytes received on this link so far."""

    kind: int
    compressed: bool
    bulk: bool
    header_bytes: int
    payload_bytes: int
    raw_payload_bytes: int
    acked_bytes: int

    @property
    def body_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


def encode_frame(
    message: Message,
    payload: bytes | memoryview = b"",
    *,
    acked_bytes: int = 0,
    bulk: bool = False,
    compress: bool = False,
) -> bytes:
    """One frame as bytes. `compress` tries zstd and keeps it only if the payload shrinks by at least 3 %."""
    header = pack(message)
    raw_bytes = len(payload)
    assert len(header) <= MAX_HEADER_BYTES, f"{type(message).__name__} header of {len(header)} bytes"
    assert raw_bytes <= MAX_PAYLOAD_BYTES, f"{type(message).__name__} payload of {raw_bytes} bytes"
    flags = _BULK if bulk else 0
    if compress and raw_bytes:
        packed = zstandard.ZstdCompressor(level=1).compress(payload)
        if len(packed) < 0.97 * raw_bytes:
            payload, flags = packed, flags | _COMPRESSED
    prefix = _PREFIX.pack(
        WIRE_VERSION, KIND_OF[type(message)], flags, len(header), len(payload), raw_bytes, acked_bytes
    )
    return b"".join((prefix, header, payload))


def decode_prefix(data: bytes) -> Prefix:
    """Check the fixed part of a frame, before memory of the declared sizes is allocated. Raises WireError."""
    version, kind, flags, header_bytes, payload_bytes, raw_bytes, acked = _PREFIX.unpack(data)
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version}, expected {WIRE_VERSION}")
    if kind not in KINDS:
        raise WireError(f"unknown frame kind {kind}")
    if flags & ~(_COMPRESSED | _BULK):
        raise WireError(f"unknown frame flags {flags}")
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {header_bytes} bytes, at most {MAX_HEADER_BYTES}")
    if payload_bytes > MAX_PAYLOAD_BYTES or raw_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload of {max(payload_bytes, raw_bytes)} bytes, at most {MAX_PAYLOAD_BYTES}")
    compressed = bool(flags & _COMPRESSED)
    if compressed and KINDS[kind] not in (Answer, Contribution, Mean):
        raise WireError(f"compressed {KINDS[kind].__name__}")  # no peer sends it, and it could expand to megabytes
    if compressed and KINDS[kind] is not Answer and raw_bytes > MAX_COMPRESSED_CHUNK_BYTES:
        raise WireError(f"a compressed {KINDS[kind].__name__} of {raw_bytes} bytes")
    if not compressed and payload_bytes != raw_bytes:
        raise WireError("an uncompressed payload declares two sizes")
    return Prefix(kind, compressed, bool(flags & _BULK), header_bytes, payload_bytes, raw_bytes, acked)


def decode_body(prefix: Prefix, body: bytes | memoryview) -> tuple[Message, bytes]:
    """The message and the raw payload of a complete frame. `body` may be reused afterwards. Raises WireError."""
    assert len(body) == prefix.body_bytes
    message = unpack(KINDS[prefix.kind], body[: prefix.header_bytes])
    payload = body[prefix.header_bytes :]
    return message, _decompress(payload, prefix.raw_payload_bytes) if prefix.compressed else bytes(payload)


def _decompress(payload: bytes | memoryview, raw_bytes: int) -> bytes:
    # python-zstandard ignores max_output_size when the frame declares its own size, so that is read first.
    try:
        declared = zstandard.get_frame_parameters(payload).content_size
        if declared != raw_bytes:
            raise WireError(f"compressed payload declares {declared} bytes, its frame {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise WireError(f"bad compressed payload: {error}") from None
    if len(raw) != raw_bytes:
        raise WireError(f"compressed payload holds {len(raw)} bytes, declared {raw_bytes}")
    return raw
