"""Messages of libp2p's circuit relay v2, which peers and relays exchange.

A peer that wants to be dialled through a relay reserves a place there ("hop" protocol). A dialling peer asks the relay
for a connection ("hop"), the relay asks the target ("stop" protocol), and then forwards bytes both ways.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from p2ptrain.errors import PeerLostError
from p2ptrain.network.control import framed, receive_frame
from p2ptrain.network.libp2p_pb2 import HopMessage, StopMessage
from p2ptrain.protocol.wire.transport import Stream

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

AnyMessage = TypeVar("AnyMessage", HopMessage, StopMessage)


async def send(stream: Stream, message: HopMessage | StopMessage) -> None:
    """Send one message. Raises PeerLostError."""
    await stream.send_all(framed(message))


async def receive(stream: Stream, kind: type[AnyMessage]) -> tuple[AnyMessage, bytes]:
    """Receive one message. Returns it and the bytes that followed. Raises PeerLostError, also for malformed messages.

    As usual in protobuf, a field of the wrong type counts as missing.
    """
    body, rest = await receive_frame(stream)
    try:
        return kind.FromString(body), rest
    except DecodeError:
        raise PeerLostError("malformed relay message") from None
