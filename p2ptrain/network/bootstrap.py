"""Reaching the peers that the user named, through which all others are found.

p2pd could do this at its start. But it dials them one after the other, says of a failure only that it failed, and
tries again after 15 minutes; we want all at once, the reason for each, and seconds.
"""

from __future__ import annotations

import math
from pathlib import Path

import trio

from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.network._hivemind import PeerID, p2pd_pb2
from p2ptrain.network.addresses import by_peer_id, hints, peer_id_bytes
from p2ptrain.network.control import ask
from p2ptrain.network.daemon import probe_flags, run_daemon
from p2ptrain.network.diagnosis import explain_unreachable
from p2ptrain.settings.peer_config import NetworkConfig

# libp2p gives each address 5 s; through a relay it takes longer.
DIAL_TIMEOUT_S = 10.0
# Once one initial peer is there, the others that are up follow within a round trip or two.
STRAGGLERS_S = 0.5
# Whoever holds our identity is usually known to the initial peer itself, and then found in milliseconds.
FIND_TIMEOUT_S = 3.0


async def dial(control_path: str, peer_id: str, maddrs: list[str], timeout_s: float) -> None:
    """Have p2pd connect to a peer, if it is not connected yet.

    Args:
        control_path: p2pd's control socket.
        peer_id: whom to reach.
        maddrs: where it may be; what is not an address is ignored. Without any, libp2p's own DHT is asked.
        timeout_s: how long it may take.

    Raises:
        PeerLostError: it cannot be reached, or not in time.
    """
    connecting = p2pd_pb2.ConnectRequest(
        peer=peer_id_bytes(peer_id), addrs=hints(maddrs, peer_id), timeout=math.ceil(timeout_s)
    )
    await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting), timeout_s)


async def dial_initial_peers(control_path: str, initial_peers: tuple[str, ...]) -> list[str]:
    """Connect to all initial peers at once, and go on when the first are there.

    Args:
        control_path: p2pd's control socket.
        initial_peers: checked multiaddrs; several may name the same peer.

    Returns:
        The ids of those that we are connected with: none only if no address was given.

    Raises:
        UnreachableError: none can be reached. The message names each and the reason. Takes at most 10 s.
    """
    addresses = by_peer_id(initial_peers)
    connected: list[str] = []
    failures: dict[str, str] = {}

    async def attempt(peer_id: str, scope: trio.CancelScope) -> None:
        try:
            await dial(control_path, peer_id, addresses[peer_id], DIAL_TIMEOUT_S)
        except PeerLostError as error:
            failures[", ".join(addresses[peer_id])] = str(error)
        else:
            connected.append(peer_id)
            scope.deadline = min(scope.deadline, trio.current_time() + STRAGGLERS_S)

    async with trio.open_nursery() as nursery:
        for peer_id in addresses:
            nursery.start_soon(attempt, peer_id, nursery.cancel_scope)
    if addresses and not connected:
        raise explain_unreachable(failures)
    return connected


def ways_in(config: NetworkConfig) -> tuple[str, ...]:
    """All addresses to join through: of the initial peers and of those that are remembered."""
    return (*config.initial_peers, *config.remembered_peers)


async def connected_peers(control_path: str) -> list[str]:
    """The ids of all peers that p2pd has a connection with. Raises PeerLostError when p2pd does not answer."""
    response = await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), DIAL_TIMEOUT_S)
    return list(dict.fromkeys(PeerID(info.id).to_base58() for info in response.peers))


async def refuse_taken_identity(
    config: NetworkConfig, peer_id: str, directory: Path, *, own: tuple[str, ...], ask: bool
) -> None:
    """Ask the network whether a peer with our identity is already there.

    Two peers of one identity break each other's connections in ways that nobody understands. It takes a second daemon,
    with an identity of its own, for 0.3 s: libp2p cannot look for itself.

    Args:
        config: whose initial and remembered peers are asked.
        peer_id: our identity.
        directory: where the second daemon's socket may be.
        own: addresses at which only a peer of our identity can be; nobody should be there.
        ask: whether they are asked.

    Raises:
        ConfigError: it is there.
        UnreachableError: no initial peer can be reached.
    """
    async with run_daemon(probe_flags(), directory / "probe.sock", config.startup_timeout_s) as daemon:
        taken = bool(own) and await _answers(daemon.control_path, peer_id, list(own))
        if not taken and ask and ways_in(config):
            await dial_initial_peers(daemon.control_path, ways_in(config))
            taken = await _is_present(daemon.control_path, peer_id)
    if taken:
        raise ConfigError(
            f"identity {config.identity} is already taken by a peer in this network ({peer_id}); stop that one, "
            "or give each peer an identity file of its own"
        )


async def _answers(control_path: str, peer_id: str, maddrs: list[str]) -> bool:
    try:
        await dial(control_path, peer_id, maddrs, FIND_TIMEOUT_S)
    except PeerLostError:
        return False
    return True


async def _is_present(control_path: str, peer_id: str) -> bool:
    with trio.move_on_after(FIND_TIMEOUT_S):
        while True:
            try:
                await dial(control_path, peer_id, [], FIND_TIMEOUT_S)
            except PeerLostError as error:
                # libp2p's DHT comes to know its first peer an instant after the connection.
                if "failed to find any peer in table" not in str(error):
                    return False
                await trio.sleep(0.02)
            else:
                return True
    return False
