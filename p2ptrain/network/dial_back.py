"""Asks peers to dial us back (libp2p's AutoNAT v1), to learn whether anybody elsewhere can.

A firewall may let nobody in to a public address. A peer learns that only from others.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import hints, peer_id_bytes
from p2ptrain.network.daemon import CONTROL_TIMEOUT_S, open_stream, public_peers
from p2ptrain.network.libp2p_pb2 import AutoNat, Dial, Peer
from p2ptrain.network.socket_stream import receive_message, send_message
from p2ptrain.protocol.membership.reachability import Scope, is_relayed, network_of, scope_of
from p2ptrain.protocol.wire.transport import Refusal

logger = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
# libp2p delays a negative answer by 15 s, against port scans.
TIMEOUT_S = 20
DIAL_OK, DIAL_ERROR = 0, 100
# How many peers are asked at once: two outvote one that lies.
MAX_ASKED = 3
# How long until they are asked again, and how long if they did not decide. A peer answers three times a minute.
ASK_EVERY_S, ASK_SOON_S = 300.0, 30.0


class DialBack(enum.Enum):
    """Result of a dial-back. UNKNOWN: the peer that we asked did not try."""

    REACHED = "reached"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Reachability:
    """Whether peers elsewhere can dial this one, by what those say that dial it back now and then.

    Attributes:
        verdict: what most of those asked last say; UNKNOWN until they decide. It becomes FAILED, and REACHED after
            FAILED, only if they say so twice in a row.
        is_shut: whether it is FAILED, over IPv4 and IPv6 alike.
        needs_relays: whether it is FAILED; before a verdict, whether somebody was asked, and nobody has reached us yet.
        told: set when somebody has reached us, or the first that were asked have answered.
    """

    def __init__(
        self,
        control_path: str,
        peer_id: str,
        maddrs: Callable[[], list[str]],
        refusal: Refusal,
        preferred: Collection[str],
    ) -> None:
        """
        Args:
            maddrs: returns our listening addresses.
            refusal: says why a peer is not asked.
            preferred: the peers that are asked before others.
        """
        self.verdict = self._before = DialBack.UNKNOWN
        self.is_shut = self.needs_relays = False
        self.told = trio.Event()
        self._control_path = control_path
        self._peer_id = peer_id
        self._maddrs = maddrs
        self._refusal = refusal
        self._preferred = preferred

    async def ask(self) -> float:
        """Ask up to three peers that we are connected to at public addresses. Takes up to 20 s.

        Returns how long to wait until the next time. Raises PeerLostError if the daemon does not answer.
        """
        results: list[tuple[str, DialBack]] = []

        async def one(peer_id: str, family: str) -> None:
            result, detail = await dial_back(self._control_path, peer_id, self._peer_id, self._maddrs())
            logger.debug("a dial-back by %s: %s, %s", peer_id, result.value, detail)
            results.append((family, result))
            if result is DialBack.REACHED and self.verdict is DialBack.UNKNOWN:
                self.needs_relays = False
                self.told.set()

        try:
            known = await public_peers(self._control_path, CONTROL_TIMEOUT_S)
            allowed = {peer: maddr for peer, maddr in known.items() if self._refusal(peer) is None}
            asked = whom_to_ask(allowed, self._maddrs(), self._preferred)
            if asked and self.verdict is DialBack.UNKNOWN:
                self.needs_relays = True  # unless they say otherwise
            async with trio.open_nursery() as nursery:
                for peer_id, family in asked.items():
                    nursery.start_soon(one, peer_id, family)
            return self._take(results)
        finally:
            self.told.set()

    def _take(self, results: list[tuple[str, DialBack]]) -> float:
        """Take what was told in a round. Returns how long to wait until the next one."""
        verdicts = by_family(results)
        decided = next((v for v in (DialBack.FAILED, DialBack.REACHED) if v in verdicts), DialBack.UNKNOWN)
        if decided is not DialBack.UNKNOWN:
            is_first = self.verdict is DialBack.UNKNOWN and decided is DialBack.REACHED
            if is_first or decided is self._before:
                self.verdict, self.is_shut = decided, DialBack.REACHED not in verdicts
            self._before = decided
        if self.verdict is not DialBack.UNKNOWN:
            self.needs_relays = self.verdict is DialBack.FAILED
        elif results:
            self.needs_relays = True
        return ASK_EVERY_S if decided is self.verdict is not DialBack.UNKNOWN else ASK_SOON_S


def whom_to_ask(peers: Mapping[str, str], own: Iterable[str], preferred: Collection[str]) -> dict[str, str]:
    """Draw at most three peers, each with the family of its address ("ip4" or "ip6").

    One of each network, so that many identities of one machine have one voice; none of our own network, whose firewall
    we may share; and none that would dial a family in which we have no public address.

    Args:
        peers: the peers that can be asked, with the addresses at which we are connected.
        own: our addresses.
        preferred: the peers that are taken first.
    """
    public = [maddr for maddr in own if scope_of(maddr) is Scope.PUBLIC and not is_relayed(maddr)]
    ours, families = set(map(network_of, public)), {maddr.split("/")[1] for maddr in public}
    drawn: dict[str, str] = {}
    taken = {"", *ours}
    for peer in sorted(random.sample(sorted(peers), len(peers)), key=lambda peer: peer not in preferred):
        network, family = network_of(peers[peer]), peers[peer].split("/")[1]
        if network not in taken and family in families and len(drawn) < MAX_ASKED:
            taken.add(network)
            drawn[peer] = family
    return drawn


def by_family(results: Collection[tuple[str, DialBack]]) -> set[DialBack]:
    """What most say of each address family."""
    return {majority(result for of, result in results if of == family) for family, _ in results}


def majority(results: Iterable[DialBack]) -> DialBack:
    """Which of REACHED and FAILED came more often; UNKNOWN if neither did."""
    times = Counter(results)
    more = times[DialBack.REACHED] - times[DialBack.FAILED]
    return DialBack.REACHED if more > 0 else DialBack.FAILED if more < 0 else DialBack.UNKNOWN


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
