"""Protobuf messages with a length prefix, as p2pd and libp2p's own protocols frame them.

Such protocols are circuit relay v2 (`relay`, `reservations`) and AutoNAT (`dialback`).
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.wire.transport import Stream

# No message of those protocols between two peers is longer.
MAX_FRAME_BYTES = 4096

AnyMessage = TypeVar("AnyMessage", bound=Message)


def framed(message: Message) -> bytes:
    """A message with its length prefix."""
    body: bytes = message.SerializeToString()
    return varint(len(body)) + body


async def send_message(stream: Stream, message: Message) -> None:
    """Send one message to a peer. Raises PeerLostError."""
    await stream.send_all(framed(message))


async def receive_message(stream: Stream, kind: type[AnyMessage]) -> tuple[AnyMessage, bytes]:
    """Receive one message from a peer. Returns it and the bytes that followed.

    As usual in protobuf, a field of the wrong type counts as missing. Raises PeerLostError if the stream ended or
    broke, or the message is malformed or too large.
    """
    data = b""
    while True:
        size, start = read_varint(data)
        if size > MAX_FRAME_BYTES or (start == 0 and len(data) >= 10):
            raise PeerLostError("malformed message")
        if start and len(data) >= start + size:
            break
        if not (some := await stream.receive_some()):
            raise PeerLostError("the stream ended before the message")
        data += some
    try:
        return kind.FromString(data[start : start + size]), data[start + size :]
    except DecodeError:
        raise PeerLostError("malformed message") from None


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes) -> tuple[int, int]:
    """Decode a varint: its value and size in bytes; (0, 0) while it is incomplete."""
    value = 0
    for index, byte in enumerate(data[:10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return 0, 0
