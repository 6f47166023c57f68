"""Asks peers to dial us back (libp2p's AutoNAT v1), to learn whether anybody elsewhere can.

An address may be public, and a firewall before it let nobody in. A peer learns that only from others.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import hints, peer_id_bytes
from p2ptrain.network.daemon import CONTROL_TIMEOUT_S, open_stream, public_peers
from p2ptrain.network.libp2p_pb2 import AutoNat, Dial, Peer
from p2ptrain.network.socket_stream import receive_message, send_message
from p2ptrain.protocol.wire.transport import Refusal

logger = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
# libp2p delays a negative answer by 15 s, against port scans.
TIMEOUT_S = 20
DIAL_OK, DIAL_ERROR = 0, 100
# How many peers are asked at once. Two of them outvote one that lies.
MAX_ASKED = 3
# How long until they are asked again, and how long if they did not decide. A peer answers three times a minute.
ASK_EVERY_S, ASK_SOON_S = 300.0, 30.0


class DialBack(enum.Enum):
    """Result of a dial-back. UNKNOWN: the peer that we asked did not try."""

    REACHED = "reached"
    FAILED = "failed"
    UNKNOWN = "unknown"


class DialBacks:
    """Whether peers elsewhere can dial this one, by what those say that we ask now and then.

    Attributes:
        failed: whether most of those asked last failed; after they once reached us, most of those asked twice.
    """

    def __init__(self, control_path: str, peer_id: str, maddrs: Callable[[], list[str]], refusal: Refusal) -> None:
        """
        Args:
            maddrs: returns our listening addresses.
            refusal: says why a peer is not asked.
        """
        self.failed = False
        self._failures, self._needed = 0, 1
        self._control_path = control_path
        self._peer_id = peer_id
        self._maddrs = maddrs
        self._refusal = refusal

    async def ask(self) -> float:
        """Ask up to three peers that we are connected to at public addresses. Takes up to 20 s.

        Returns how long to wait until the next time. Raises PeerLostError if the daemon does not answer.
        """
        known = await public_peers(self._control_path, CONTROL_TIMEOUT_S)
        asked = [peer for peer in known if self._refusal(peer) is None]
        results: list[DialBack] = []

        async def one(peer_id: str) -> None:
            result, detail = await dial_back(self._control_path, peer_id, self._peer_id, self._maddrs())
            logger.debug("a dial-back by %s: %s, %s", peer_id, result.value, detail)
            results.append(result)

        async with trio.open_nursery() as nursery:
            for peer_id in random.sample(asked, min(len(asked), MAX_ASKED)):
                nursery.start_soon(one, peer_id)
        match majority(results):
            case DialBack.REACHED:
                self._failures, self._needed = 0, 2
            case DialBack.FAILED:
                self._failures += 1
            case None:
                return ASK_SOON_S
        self.failed = self._failures >= self._needed
        return ASK_SOON_S if self._failures and not self.failed else ASK_EVERY_S


def majority(results: Iterable[DialBack]) -> DialBack | None:
    """Which of REACHED and FAILED came more often; None if neither."""
    times = Counter(results)
    reached, failed = times[DialBack.REACHED], times[DialBack.FAILED]
    if reached == failed:
        return None
    return DialBack.REACHED if reached > failed else DialBack.FAILED


async def dial_back(control_path: str, asked: str, peer_id: str, maddrs: list[str]) -> tuple[DialBack, str]:
    """Ask the connected peer `asked` to dial us at `maddrs`, our listening addresses (libp2p's AutoNAT v1).

    It dials only the host at which it sees us, at the ports that we name. It dials with another identity, so that it
    opens a new connection. It refuses addresses that are not public.

    Returns:
        The result, and the address that was reached or the peer's explanation.
    """
    try:
        with trio.fail_after(TIMEOUT_S):
            stream = await open_stream(control_path, asked, AUTONAT, TIMEOUT_S)
            try:
                await send_message(stream, question(peer_id_bytes(peer_id), hints(maddrs, peer_id)))
                answer, _ = await receive_message(stream, AutoNat)
                return read_answer(answer)
            finally:
                stream.fail("done")
    except (PeerLostError, WireError, trio.TooSlowError) as error:
        logger.debug("no dial-back from %s: %s", asked, error)
        return DialBack.UNKNOWN, str(error)


def question(peer_id: bytes, addresses: list[bytes]) -> AutoNat:
    """The request to be dialled."""
    return AutoNat(type=AutoNat.DIAL, dial=Dial(peer=Peer(id=peer_id, addrs=addresses)))


def read_answer(answer: AutoNat) -> tuple[DialBack, str]:
    """The result in an answer. Raises WireError."""
    if not answer.HasField("response"):
        raise WireError("no answer to a dial-back request")
    response = answer.response
    if response.status == DIAL_OK:
        try:
            reached = str(Multiaddr(response.address))
        except Exception:  # the parser raises many types
            reached = ""
        if not reached.isprintable() or not reached:  # a path of /unix may hold anything
            raise WireError("an answer to a dial-back request without its address")
        return DialBack.REACHED, reached
    text = "".join(filter(str.isprintable, response.text.decode(errors="replace")[:200]))
    return DialBack.FAILED if response.status == DIAL_ERROR else DialBack.UNKNOWN, text
