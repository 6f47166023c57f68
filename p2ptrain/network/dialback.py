"""Being dialled back: whether a peer that we are connected with can open a connection to us, over libp2p's AutoNAT.

The protocol is one question and one answer (libp2p's specification `autonat/autonat-v1.md`), which every p2ptrain peer
answers. Whoever is asked dials only the address that it sees us under, with the ports that we name, under another
identity, so that no connection that is there already can stand in; and it refuses where that address is not public.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr, p2pd_pb2
from p2ptrain.network.addresses import hints, peer_id_bytes
from p2ptrain.network.control import DaemonSocket, ask_for_stream

logger = logging.getLogger(__name__)

PROTOCOL_NAME = "/libp2p/autonat/1.0.0"
# An answer that it failed comes after 15 s, so that nobody can scan ports by it.
TIMEOUT_S = 20
# Fields of the protocol's messages.
TYPE, DIAL, RESPONSE = 1, 2, 3
PEER, ID, ADDRESSES = 1, 1, 2
STATUS, STATUS_TEXT, ADDRESS = 1, 2, 3
OK, DIAL_ERROR = 0, 100
MAX_ANSWER_BYTES = 4096


class DialBack(enum.Enum):
    """What came of it. UNKNOWN: the other would not try."""

    REACHED = "reached"
    FAILED = "failed"
    UNKNOWN = "unknown"


async def dial_back(control_path: str, asked: str, peer_id: str, maddrs: list[str]) -> tuple[DialBack, str]:
    """Ask a peer that we are connected with to dial us.

    Args:
        control_path: of our daemon.
        asked: id of that peer.
        peer_id: ours.
        maddrs: where we listen.

    Returns:
        What came of it; and the address that it reached us under, or what it said.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(asked), proto=[PROTOCOL_NAME], timeout=TIMEOUT_S)
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    try:
        _, stream = await ask_for_stream(control_path, request, TIMEOUT_S)
        try:
            await stream.send_all(question(peer_id_bytes(peer_id), hints(maddrs, peer_id)))
            return read_answer(await _receive(stream))
        finally:
            stream.fail("done")
    except (PeerLostError, WireError) as error:
        logger.debug("%s was not asked to dial back: %s", asked, error)
        return DialBack.UNKNOWN, str(error)


def question(peer_id: bytes, addresses: list[bytes]) -> bytes:
    """The message that asks to be dialled, with its length before it."""
    peer = _field(ID, peer_id) + b"".join(_field(ADDRESSES, address) for address in addresses)
    message = bytes([TYPE << 3, 0]) + _field(DIAL, _field(PEER, peer))
    return _varint(len(message)) + message


def read_answer(message: bytes) -> tuple[DialBack, str]:
    """What an answer says, without its length. Raises WireError."""
    response = next((value for number, value in _fields(message) if number == RESPONSE), None)
    if not isinstance(response, bytes):
        raise WireError("no answer to a dial")
    fields = dict(_fields(response))
    status, text, address = fields.get(STATUS, OK), fields.get(STATUS_TEXT, b""), fields.get(ADDRESS, b"")
    if not isinstance(text, bytes) or not isinstance(address, bytes):
        raise WireError("an answer to a dial of other types")
    if status == OK:
        try:
            reached = str(Multiaddr(address))
        except Exception:  # the parser raises whatever it stumbles over
            reached = ""
        if not reached:
            raise WireError("an answer to a dial without its address")
        return DialBack.REACHED, reached
    said = "".join(character for character in text.decode(errors="replace")[:200] if character.isprintable())
    return DialBack.FAILED if status == DIAL_ERROR else DialBack.UNKNOWN, said


async def _receive(stream: DaemonSocket) -> bytes:
    """One message with its length before it. Raises PeerLostError, WireError."""
    data = b""
    while True:
        more = await stream.receive_some()
        if not more:
            raise PeerLostError("it did not answer")
        data += more
        size, start = _read_varint(data, 0)
        if size > MAX_ANSWER_BYTES:
            raise WireError(f"an answer of {size} bytes")
        if start and len(data) >= start + size:
            return data[start : start + size]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, of the two kinds that this protocol has. Raises WireError."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value, at = _read_varint(message, at) if at else (0, 0)
        if at == 0 or tag & 7 not in (0, 2) or (tag & 7 == 2 and at + value > len(message)):
            raise WireError("an answer to a dial that is no message")
        if tag & 7 == 0:
            yield tag >> 3, value
        else:
            yield tag >> 3, message[at : at + value]
            at += value


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it; the place is 0 where the number is cut off."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    return 0, 0
