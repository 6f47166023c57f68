"""Places at relays: how a peer behind NAT gets an address under which others can dial it (libp2p's circuit relay v2).

A relay is a peer with a public address that passes bytes on between two others. It sees who talks to whom and how
much; the streams inside are as encrypted and authenticated as all others. Whoever has a place at a relay can be dialled
through it by anybody who can dial the relay.

p2pd asks for places by itself only from relays that were named at its start, if all of them answer, and once others
have told it that it is behind NAT; else after three minutes. But asking is one message. So we send it ourselves, to
whatever public peers we are connected with: initial peers at the start, and others once they are gone.
"""

from __future__ import annotations

import contextlib
import logging

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network import circuit
from p2ptrain.network._hivemind import Multiaddr, PeerID, p2pd_pb2
from p2ptrain.network.circuit_pb2 import HopMessage, Status
from p2ptrain.network.control import ask, open_stream
from p2ptrain.protocol.membership.reachability import Scope, is_relayed, scope_of

logger = logging.getLogger(__name__)

# The second is for when the first goes; each carries what all its peers say to each other.
MAX_RELAYS = 2
# A place of ours lapses after two minutes, one of other relays with the connection; and asking costs next to nothing.
RENEW_EVERY_S = 20.0
ASK_TIMEOUT_S = 3.0
# Whoever refused is not asked again for a while: it may be full, or no relay.
REFUSED_S = 120.0
# Every libp2p program passes on 128 KiB for two minutes; that is for finding each other, not for training.
MIN_CIRCUIT_BYTES, MIN_CIRCUIT_S = 2**30, 600


class Relays:
    """The places that this peer has.

    Attributes:
        maddrs: addresses that lead here through relays, without our peer id.
    """

    def __init__(self, control_path: str) -> None:
        self.maddrs: tuple[Multiaddr, ...] = ()
        self._control_path = control_path
        self._places: dict[str, str] = {}
        self._refused_until_s: dict[str, float] = {}

    async def renew(self) -> None:
        """Keep the places that we have, and ask for others while there are fewer than two.

        Raises:
            PeerLostError: the daemon does not answer.
        """
        now = trio.current_time()
        self._refused_until_s = {relay: until_s for relay, until_s in self._refused_until_s.items() if until_s > now}
        candidates = {**self._places, **await self._public_peers()}
        kept: dict[str, str] = {}
        try:
            for relay, maddr in candidates.items():
                if len(kept) == MAX_RELAYS:
                    break
                if relay not in self._refused_until_s and await self._has_place(relay):
                    kept[relay] = maddr
        finally:
            self._places = kept
            self.maddrs = tuple(Multiaddr(f"{maddr}/p2p/{relay}/p2p-circuit") for relay, maddr in kept.items())

    async def _has_place(self, relay: str) -> bool:
        """Whether a relay gives us a place, or renews it."""
        try:
            await self._reserve(relay)
        except PeerLostError as error:
            logger.debug("no place at relay %s: %s", relay, error)
            # Where we had one, the relay may be busy or just started anew.
            if relay not in self._places:
                self._refused_until_s[relay] = trio.current_time() + REFUSED_S
            return False
        return True

    async def _public_peers(self) -> dict[str, str]:
        """Those that we are connected with at a public address, and that address."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response = await ask(self._control_path, request, ASK_TIMEOUT_S)
        found: dict[str, str] = {}
        for connection in response.peers:
            with contextlib.suppress(Exception):  # a kind of address that hivemind's parser does not know
                maddr = str(Multiaddr(connection.addrs[0]))
                if scope_of(maddr) is Scope.PUBLIC and not is_relayed(maddr):
                    found[PeerID(connection.id).to_base58()] = maddr
        return found

    async def _reserve(self, relay: str) -> None:
        """Ask for a place, or for its renewal. Raises PeerLostError when the relay is gone or refuses."""
        stream = await open_stream(self._control_path, relay, circuit.HOP, ASK_TIMEOUT_S)
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                await circuit.send(stream, HopMessage(type=HopMessage.RESERVE))
                answer, _ = await circuit.receive(stream, HopMessage)
                check_answer(answer)
                return
        finally:
            stream.fail("asked")
        raise PeerLostError("no answer")


def check_answer(answer: HopMessage) -> None:
    """Raises PeerLostError unless a relay's answer grants a place whose circuits are good enough to train over."""
    if answer.status != Status.OK:
        raise PeerLostError(f"it refused, with status {answer.status}")
    # What is not limited is not mentioned, and reads as 0.
    seconds, size = answer.limit.duration, answer.limit.data
    if 0 < seconds < MIN_CIRCUIT_S or 0 < size < MIN_CIRCUIT_BYTES:
        raise PeerLostError(f"it passes on {size} bytes in {seconds} s at most")
