"""Reservations at relays, through which other peers can dial a peer behind NAT (libp2p's circuit relay v2).

A relay is a peer with a public address that forwards bytes between two peers. A peer with a reservation can be dialled
by every peer that can dial the relay.

p2pd reserves only at relays named at its start, if all answer and after other peers report that it is behind NAT, or
after three minutes. A reservation takes one message, so we send it to any connected public peers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.control import connections, open_stream
from p2ptrain.network.libp2p_pb2 import HopMessage, Status
from p2ptrain.network.relay import HOP
from p2ptrain.network.socket_stream import receive_message, send_message
from p2ptrain.protocol.membership.reachability import Scope, is_relayed, scope_of
from p2ptrain.protocol.wire.transport import Refusal, said_here

logger = logging.getLogger(__name__)

# The second is a spare. Relays carry all traffic of their peers, so no more are used.
MAX_RELAYS = 2
# A reservation at a p2ptrain peer expires after two minutes, at other relays with the connection; renewing is cheap.
RENEW_EVERY_S = 20.0
ASK_TIMEOUT_S = 3.0
# A peer that refused is not asked again for a while: it may be full, or not a relay.
REFUSED_S = 120.0
# Many libp2p programs forward 128 KiB for two minutes; that is too little for training.
MIN_CIRCUIT_BYTES, MIN_CIRCUIT_S = 2**30, 600


class Reservations:
    """This peer's reservations, at relays that the user does not refuse.

    `maddrs`: our addresses through them, without our peer id.
    """

    def __init__(self, control_path: str, refusal: Refusal) -> None:
        self.maddrs: tuple[Multiaddr, ...] = ()
        self._control_path = control_path
        self._refusal = refusal
        self._told: set[str] = set()
        self._reserved: dict[str, str] = {}
        self._refused_until_s: dict[str, float] = {}

    def relays(self) -> Collection[str]:
        """Where we have a place."""
        return self._reserved.keys()

    async def renew(self) -> None:
        """Renew our reservations, and ask for more while there are fewer than two.

        Raises PeerLostError if the daemon does not answer.
        """
        now = trio.current_time()
        self._refused_until_s = {relay: until_s for relay, until_s in self._refused_until_s.items() if until_s > now}
        candidates = {**self._reserved, **await self._public_peers()}
        for relay in candidates:
            if (reason := self._refusal(relay)) is not None and relay not in self._told:
                self._told.add(relay)
                logger.info("%s is not used as a relay: %s", relay, said_here(reason))
        kept: dict[str, str] = {}
        try:
            for relay, maddr in candidates.items():
                if len(kept) == MAX_RELAYS:
                    break
                refused = relay in self._refused_until_s or self._refusal(relay) is not None
                if not refused and await self._is_granted(relay):
                    kept[relay] = maddr
        finally:
            self._reserved = kept
            self.maddrs = tuple(Multiaddr(f"{maddr}/p2p/{relay}/p2p-circuit") for relay, maddr in kept.items())

    async def _is_granted(self, relay: str) -> bool:
        """Whether a relay grants or renews a reservation."""
        try:
            await self._reserve(relay)
        except PeerLostError as error:
            logger.debug("no reservation at relay %s: %s", relay, error)
            # A relay where we had one may be busy or restarting.
            if relay not in self._reserved:
                self._refused_until_s[relay] = trio.current_time() + REFUSED_S
            return False
        return True

    async def _public_peers(self) -> dict[str, str]:
        """Peers that we are connected to at a public address, with that address."""
        return {
            peer_id: maddr
            for peer_id, maddr in await connections(self._control_path, ASK_TIMEOUT_S)
            if maddr and scope_of(maddr) is Scope.PUBLIC and not is_relayed(maddr)
        }

    async def _reserve(self, relay: str) -> None:
        """Ask for a reservation or its renewal. Raises PeerLostError if the relay is gone or refuses."""
        stream = await open_stream(self._control_path, relay, HOP, ASK_TIMEOUT_S)
        try:
            with trio.move_on_after(ASK_TIMEOUT_S):
                await send_message(stream, HopMessage(type=HopMessage.RESERVE))
                answer, _ = await receive_message(stream, HopMessage)
                check_answer(answer)
                return
        finally:
            stream.fail("asked")
        raise PeerLostError("no answer")


def check_answer(answer: HopMessage) -> None:
    """Raises PeerLostError unless a relay grants a reservation with limits that are high enough for training."""
    if answer.status != Status.OK:
        raise PeerLostError(f"it refused, with status {answer.status}")
    # A missing field means no limit, and reads as 0.
    seconds, size = answer.limit.duration, answer.limit.data
    if 0 < seconds < MIN_CIRCUIT_S or 0 < size < MIN_CIRCUIT_BYTES:
        raise PeerLostError(f"it forwards at most {size} bytes in {seconds} s")
