"""Asks peers to dial us back (libp2p's AutoNAT v1), to learn whether anybody elsewhere can.

A firewall may let nobody in to a public address. A peer learns that only from others.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import hints, peer_id_bytes
from p2ptrain.network.daemon import CONTROL_TIMEOUT_S, open_stream, public_peers
from p2ptrain.network.libp2p_pb2 import AutoNat, Dial, Peer
from p2ptrain.network.socket_stream import receive_message, send_message
from p2ptrain.protocol.membership.reachability import is_direct_public, network_of
from p2ptrain.protocol.wire.transport import Refusal

logger = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
# libp2p delays a negative answer by 15 s, against port scans.
TIMEOUT_S = 20
DIAL_OK, DIAL_ERROR = 0, 100
# How many peers are asked at once over each of IPv4 and IPv6: where three answer, two outvote one that lies.
MAX_ASKED = 3
# How long until they are asked again, and how long if they did not decide. A peer answers three times a minute.
ASK_EVERY_S, ASK_SOON_S = 300.0, 30.0


class DialBack(enum.Enum):
    """Result of a dial-back. UNKNOWN: the peer that we asked did not try."""

    REACHED = "reached"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Standing:
    """Whether peers elsewhere can dial this one, as far as it knows.

    Attributes:
        verdicts: REACHED or FAILED by address family ("ip4", "ip6"). The first REACHED counts at once; any other change
            needs two rounds of dial-backs that decide, one after the other.
        latest: what the last round that decided said of a family.
        is_suspected: whether there is no verdict, and nobody who was asked has reached us yet.
    """

    verdicts: Mapping[str, DialBack] = field(default_factory=dict)
    latest: Mapping[str, DialBack] = field(default_factory=dict)
    is_suspected: bool = False

    @property
    def shut_families(self) -> set[str]:
        """The families over which nobody elsewhere can dial us."""
        return {family for family, verdict in self.verdicts.items() if verdict is DialBack.FAILED}

    @property
    def needs_relays(self) -> bool:
        return bool(self.shut_families) or self.is_suspected

    @property
    def is_shut(self) -> bool:
        """Whether nobody elsewhere can dial us over any family."""
        return bool(self.verdicts) and len(self.shut_families) == len(self.verdicts)

    @property
    def is_settled(self) -> bool:
        return bool(self.verdicts) and self.verdicts == self.latest

    def after(self, results: Collection[tuple[str, DialBack]]) -> Standing:
        """The standing after a round: the result of each peer that was asked, with the family of its address."""
        verdicts, latest = dict(self.verdicts), dict(self.latest)
        for family in {family for family, _ in results}:
            decided = majority(result for of, result in results if of == family)
            if decided is DialBack.UNKNOWN:
                continue
            if decided is latest.get(family) or (decided is DialBack.REACHED and family not in verdicts):
                verdicts[family] = decided
            latest[family] = decided
        return Standing(verdicts, latest, is_suspected=bool(results) and not verdicts)


class DialBacks:
    """Has peers dial this one back now and then.

    Attributes:
        standing: what follows from their answers.
        told: set when one of them has reached us, or the first that were asked have answered.
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
        self.standing = Standing()
        self.told = trio.Event()
        self._control_path = control_path
        self._peer_id = peer_id
        self._maddrs = maddrs
        self._refusal = refusal
        self._preferred = preferred
        self._rng = random.Random()

    async def ask(self) -> float:
        """Ask some of the peers that we are connected to at public addresses. Takes up to 20 s.

        Returns how long to wait until the next time. Raises PeerLostError if the daemon does not answer.
        """
        results: list[tuple[str, DialBack]] = []

        async def one(peer_id: str, family: str) -> None:
            result, detail = await dial_back(self._control_path, peer_id, self._peer_id, self._maddrs())
            logger.debug("a dial-back by %s: %s, %s", peer_id, result.value, detail)
            results.append((family, result))
            if result is DialBack.REACHED:
                self.standing = replace(self.standing, is_suspected=False)
                self.told.set()

        try:
            known = await public_peers(self._control_path, CONTROL_TIMEOUT_S)
            allowed = {peer: maddr for peer, maddr in known.items() if self._refusal(peer) is None}
            asked = whom_to_ask(allowed, self._maddrs(), self._preferred, self._rng)
            if asked and not self.standing.verdicts:
                self.standing = replace(self.standing, is_suspected=True)
            async with trio.open_nursery() as nursery:
                for peer_id, family in asked.items():
                    nursery.start_soon(one, peer_id, family)
            self.standing = self.standing.after(results)
        finally:
            self.told.set()
        return ASK_EVERY_S if self.standing.is_settled else ASK_SOON_S


def whom_to_ask(
    peers: Mapping[str, str], own: Iterable[str], preferred: Collection[str], rng: random.Random
) -> dict[str, str]:
    """Draw at most three peers for each address family, each with that family ("ip4" or "ip6").

    One of each network, so that many identities of one machine have one voice; none of our own network, whose firewall
    we may share; and none that would dial a family in which we have no public address.

    Args:
        peers: the peers that can be asked, with the addresses at which we are connected.
        own: our addresses.
        preferred: the peers that are taken first.
    """
    public = [maddr for maddr in own if is_direct_public(maddr)]
    families = {maddr.split("/")[1] for maddr in public}
    taken = {"", *map(network_of, public)}
    drawn: dict[str, str] = {}
    for peer in sorted(rng.sample(sorted(peers), len(peers)), key=lambda peer: peer not in preferred):
        network, family = network_of(peers[peer]), peers[peer].split("/")[1]
        if network not in taken and family in families and list(drawn.values()).count(family) < MAX_ASKED:
            taken.add(network)
            drawn[peer] = family
    return drawn


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
