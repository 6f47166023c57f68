"""Tests the network with a temporary daemon: at which addresses others see this machine, and which peers it reaches.

It uses new identities, and leaves nothing behind. It asks initial peers for the time, for a dial-back, and for the rate
of an upload through each interface.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from p2ptrain.errors import P2PTrainError, PeerLostError
from p2ptrain.network._hivemind import P2P, Multiaddr
from p2ptrain.network.addresses import by_peer_id, check_initial_peers
from p2ptrain.network.daemon import (
    DIAL_TIMEOUT_S,
    dial,
    explain_dial,
    own_maddrs,
    peer_flags,
    probe_flags,
    run_daemon,
)
from p2ptrain.network.dht import clock_ahead_s
from p2ptrain.network.dial_back import DialBack, dial_back
from p2ptrain.network.identity import hold_identity
from p2ptrain.network.process_lifetime import scratch_directory
from p2ptrain.network.thread import from_asyncio
from p2ptrain.network.ways import Interface, Way, forwarded, interfaces_of, upload_rate, ways_to
from p2ptrain.settings.link import BYTES_PER_MBIT
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

# All rates together; each takes about 3 s, of which its daemon half a second.
RATES_TIMEOUT_S = 30.0


@dataclass
class InitialPeer:
    """Result of reaching one initial peer.

    Attributes:
        failure: why it was not reached; "" if it was.
        reached_s: seconds until the encrypted connection was open.
        answered_s: seconds of a DHT ping; None without an answer.
        clock_ahead_s: seconds that our clock is at least ahead of its (negative: behind); None without an answer.
        dialled_back: result of its dial-back, with the address or its explanation.
        ways: the ways to it through this machine's interfaces, fastest first; none if it is on this machine.
    """

    peer_id: str
    maddrs: list[str]
    failure: str = ""
    reached_s: float = 0.0
    answered_s: float | None = None
    clock_ahead_s: float | None = None
    dialled_back: tuple[DialBack, str] = (DialBack.UNKNOWN, "")
    ways: list[Way] = field(default_factory=list)


@dataclass
class Probe:
    """Result of a probe: seconds until the daemon had started, our addresses as libp2p finds them, initial peers."""

    started_s: float
    maddrs: list[str] = field(default_factory=list)
    peers: list[InitialPeer] = field(default_factory=list)


async def probe(config: NetworkConfig, *, mapping_s: float) -> Probe:
    """Start a daemon as a peer would, and reach all initial peers. The config's identity is not used.

    `mapping_s` is how long a router may take to map a port. Raises ConfigError if an address is invalid or the daemon
    does not start, and PeerLostError if it ends during the probe.
    """
    check_initial_peers(config.initial_peers)
    with scratch_directory() as scratch, hold_identity(None, scratch) as identity:
        began_s = trio.current_time()
        flags = peer_flags(config, identity.path)
        async with run_daemon(flags, scratch / "p2pd.sock", config.startup_timeout_s) as daemon:
            found = Probe(trio.current_time() - began_s)
            found.peers = [InitialPeer(*item) for item in by_peer_id(config.initial_peers).items()]
            p2p = await from_asyncio(P2P.replicate(Multiaddr(f"/unix{daemon.control_path}")))
            try:
                async with trio.open_nursery() as nursery:
                    for peer in found.peers:
                        nursery.start_soon(_reach, daemon.control_path, p2p, peer)
                    await trio.sleep(mapping_s)
                found.maddrs = await own_maddrs(daemon.control_path, identity.peer_id)
                interfaces = interfaces_of(found.maddrs)
                async with trio.open_nursery() as nursery:
                    for peer in found.peers:
                        if not peer.failure:
                            nursery.start_soon(_compare_ways, peer, interfaces)
                # One after the other, as one dial-back is enough.
                for peer in found.peers:
                    if peer.answered_s is not None:
                        peer.dialled_back = await dial_back(
                            daemon.control_path, peer.peer_id, identity.peer_id, found.maddrs
                        )
                    if peer.dialled_back[0] is not DialBack.UNKNOWN:
                        break
            finally:
                with trio.CancelScope(shield=True):
                    await from_asyncio(p2p.shutdown())
        # One after the other, as they share cables.
        with trio.move_on_after(RATES_TIMEOUT_S):
            for peer in found.peers:
                for index, way in enumerate(peer.ways):
                    if way.rtt_s is not None:
                        peer.ways[index] = replace(way, mbit=await _rate_through(way, peer.peer_id, scratch, config))
        return found


async def _reach(control_path: str, p2p: P2P, peer: InitialPeer) -> None:
    began_s = trio.current_time()
    try:
        await dial(control_path, peer.peer_id, peer.maddrs, DIAL_TIMEOUT_S)
    except PeerLostError as error:
        peer.failure = explain_dial(str(error))
        return
    peer.reached_s = trio.current_time() - began_s
    began_s = trio.current_time()
    peer.clock_ahead_s = await clock_ahead_s(p2p, peer.peer_id)
    if peer.clock_ahead_s is not None:
        peer.answered_s = trio.current_time() - began_s


async def _compare_ways(peer: InitialPeer, interfaces: list[Interface]) -> None:
    peer.ways = await ways_to(peer.maddrs, interfaces)


async def _rate_through(way: Way, peer_id: str, scratch: Path, config: NetworkConfig) -> float | None:
    """Mbit/s along a way; None if the peer does not measure it.

    It takes another daemon, because one that knows other addresses of the peer would dial them too.
    """
    try:
        async with (
            forwarded(way) as maddr,
            run_daemon(probe_flags(), scratch / "rate.sock", config.startup_timeout_s) as daemon,
        ):
            await dial(daemon.control_path, peer_id, [maddr], DIAL_TIMEOUT_S)
            rate = await upload_rate(daemon.control_path, peer_id)
    except P2PTrainError as error:
        logger.debug("no rate through %s: %s", way.interface.address, error)
        return None
    return None if rate is None else rate / BYTES_PER_MBIT
