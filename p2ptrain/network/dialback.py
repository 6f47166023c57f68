"""Asking a connected peer to dial us, over libp2p's AutoNAT v1: can other peers open a connection to this one?

The asked peer dials only the address that it sees us under, with the ports that we name. It dials under another
identity, so an existing connection is not reused, and refuses addresses that are not public.
"""

from __future__ import annotations

import enum
import logging

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import hints, peer_id_bytes
from p2ptrain.network.control import open_stream
from p2ptrain.network.libp2p_pb2 import AutoNat, Dial, Peer
from p2ptrain.network.socket_stream import receive_message, send_message

logger = logging.getLogger(__name__)

PROTOCOL_NAME = "/libp2p/autonat/1.0.0"
# libp2p delays a negative answer by 15 s, against port scans.
TIMEOUT_S = 20
OK, DIAL_ERROR = 0, 100


class DialBack(enum.Enum):
    """Result of a dial-back. UNKNOWN: the asked peer did not try."""

    REACHED = "reached"
    FAILED = "failed"
    UNKNOWN = "unknown"


async def dial_back(control_path: str, asked: str, peer_id: str, maddrs: list[str]) -> tuple[DialBack, str]:
    """Ask the connected peer `asked` to dial us at `maddrs`, our listening addresses.

    Returns:
        The result, and the address that was reached or the peer's explanation.
    """
    try:
        stream = await open_stream(control_path, asked, PROTOCOL_NAME, TIMEOUT_S)
        try:
            await send_message(stream, question(peer_id_bytes(peer_id), hints(maddrs, peer_id)))
            answer, _ = await receive_message(stream, AutoNat)
            return read_answer(answer)
        finally:
            stream.fail("done")
    except (PeerLostError, WireError) as error:
        logger.debug("no dial-back from %s: %s", asked, error)
        return DialBack.UNKNOWN, str(error)


def question(peer_id: bytes, addresses: list[bytes]) -> AutoNat:
    """The request to be dialled."""
    return AutoNat(type=AutoNat.DIAL, dial=Dial(peer=Peer(id=peer_id, addrs=addresses)))


def read_answer(answer: AutoNat) -> tuple[DialBack, str]:
    """The result that an answer tells. Raises WireError."""
    if not answer.HasField("response"):
        raise WireError("no answer to a dial-back request")
    response = answer.response
    if response.status == OK:
        try:
            reached = str(Multiaddr(response.address))
        except Exception:  # the parser raises many types
            reached = ""
        if not reached.isprintable() or not reached:  # a path of /unix may hold anything
            raise WireError("an answer to a dial-back request without its address")
        return DialBack.REACHED, reached
    text = "".join(filter(str.isprintable, response.text.decode(errors="replace")[:200]))
    return DialBack.FAILED if response.status == DIAL_ERROR else DialBack.UNKNOWN, text
