"""What relays and those who use them say to each other: libp2p's circuit relay, version 2.

Whoever wants to be dialled through a relay reserves a place there ("hop" protocol). Whoever dials asks the relay to
connect the two ("hop" again), the relay asks the other ("stop" protocol), and from then on passes bytes on. Messages
are protobuf with their length before them; few enough to be written here.
"""

from __future__ import annotations

import enum
from typing import Any

from p2ptrain.errors import PeerLostError
from p2ptrain.network.control import read_varint, varint
from p2ptrain.protocol.wire.transport import Stream

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES = 4096

Fields = dict[int, Any]
"""A message by field number: ints, and bytes for texts and messages."""

# HopMessage: type, peer, reservation, limit, status. StopMessage: type, peer, limit, status.
HOP_TYPE, HOP_PEER, HOP_RESERVATION, HOP_LIMIT, HOP_STATUS = 1, 2, 3, 4, 5
STOP_TYPE, STOP_PEER, STOP_STATUS = 1, 2, 4
HOP_RESERVE, HOP_CONNECT, HOP_ANSWER = 0, 1, 2
STOP_CONNECT = 0
# Of the messages inside those.
PEER_ID, RESERVATION_EXPIRES, LIMIT_S, LIMIT_BYTES = 1, 1, 1, 2


class Status(enum.IntEnum):
    """How a request went."""

    OK = 100
    REFUSED = 200
    FULL = 201
    CONNECTION_FAILED = 203
    NO_PLACE = 204
    MALFORMED = 400


def encode(fields: Fields) -> bytes:
    """A message without its length."""
    return b"".join(
        varint(number << 3 | 2) + varint(len(value)) + value
        if isinstance(value, bytes)
        else varint(number << 3) + varint(value)
        for number, value in fields.items()
    )


def decode(body: bytes) -> Fields:
    """The fields of a message. Raises PeerLostError for anything that is none."""
    fields: Fields = {}
    while body:
        tag, size = read_varint(body)
        value, more = read_varint(body[size:])
        body = body[size + more :]
        if not size or not more or tag & 7 not in (0, 2) or (tag & 7 == 2 and value > len(body)):
            raise PeerLostError("malformed relay message")
        if tag & 7 == 2:
            fields[tag >> 3], body = body[:value], body[value:]
        else:
            fields[tag >> 3] = value
    return fields


async def send(stream: Stream, fields: Fields) -> None:
    """Send one message. Raises PeerLostError."""
    body = encode(fields)
    await stream.send_all(varint(len(body)) + body)


async def receive(stream: Stream) -> tuple[Fields, bytes]:
    """The next message, and what came behind it already. Raises PeerLostError."""
    data = b""
    while True:
        size, start = read_varint(data)
        if size > MAX_MESSAGE_BYTES or (start == 0 and len(data) >= 10):
            raise PeerLostError("malformed relay message")
        if start and len(data) >= start + size:
            return decode(data[start : start + size]), data[start + size :]
        if not (some := await stream.receive_some()):
            raise PeerLostError("the stream ended before the message")
        data += some


def of_kind(fields: Fields, number: int, kind: type[Any]) -> Any:
    """A field's value, or the kind's own zero where it is missing. Raises PeerLostError when it is of another kind."""
    value = fields.get(number, kind())
    if not isinstance(value, kind):
        raise PeerLostError("malformed relay message")
    return value
