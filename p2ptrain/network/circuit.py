"""What relays and those who use them say to each other: libp2p's circuit relay, version 2.

Whoever wants to be dialled through a relay reserves a place there ("hop" protocol). Whoever dials asks the relay to
connect the two ("hop" again), the relay asks the other ("stop" protocol), and from then on passes bytes on. Messages
are those of `circuit.proto`, with their length before them.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from p2ptrain.errors import PeerLostError
from p2ptrain.network.circuit_pb2 import HopMessage, StopMessage
from p2ptrain.network.control import read_varint, varint
from p2ptrain.protocol.wire.transport import Stream

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES = 4096

AnyMessage = TypeVar("AnyMessage", HopMessage, StopMessage)


async def send(stream: Stream, message: HopMessage | StopMessage) -> None:
    """Send one message. Raises PeerLostError."""
    body = message.SerializeToString()
    await stream.send_all(varint(len(body)) + body)


async def receive(stream: Stream, kind: type[AnyMessage]) -> tuple[AnyMessage, bytes]:
    """The next message, and what came behind it already. Raises PeerLostError, also for what is no such message.

    A field of another type than it should have is as good as missing, as everywhere in protobuf.
    """
    data = b""
    while True:
        size, start = read_varint(data)
        if size > MAX_MESSAGE_BYTES or (start == 0 and len(data) >= 10):
            raise PeerLostError("malformed relay message")
        if start and len(data) >= start + size:
            try:
                return kind.FromString(data[start : start + size]), data[start + size :]
            except DecodeError:
                raise PeerLostError("malformed relay message") from None
        if not (some := await stream.receive_some()):
            raise PeerLostError("the stream ended before the message")
        data += some
