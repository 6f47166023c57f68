"""Dials the initial peers, through which all other peers are found.

p2pd could do this at its start, but it dials them one by one, gives no reasons for failures, and retries only after 15
minutes. Here all are dialled at once, within seconds, with a reason for each failure.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import trio

from p2ptrain.errors import ConfigError, PeerLostError, UnreachableError
from p2ptrain.network._hivemind import p2pd_pb2
from p2ptrain.network.addresses import by_peer_id, hints, peer_id_bytes
from p2ptrain.network.control import ask, connections
from p2ptrain.network.daemon import probe_flags, run_daemon
from p2ptrain.settings.peer_config import NetworkConfig

# libp2p gives each address 5 s; through a relay it takes longer.
DIAL_TIMEOUT_S = 10.0
# Once one initial peer is connected, the reachable ones follow within a round trip or two.
STRAGGLERS_S = 0.5
# The initial peer usually knows a peer with our identity, and then answers in milliseconds.
FIND_TIMEOUT_S = 3.0
# p2pd's messages about a failed dial, and their meaning; the first match counts.
_DIAL_REASONS = (
    (r"peer id mismatch.* key matches (\w+)", r"another peer answers there, with the id \1"),
    (r"connection refused", "connection refused: nothing listens on that port"),
    (r"no such host|failed to resolve|no (good )?addresses", "the host name or address cannot be resolved"),
    (r"unreachable|no route", "there is no route to that address"),
    (r"deadline exceeded|timeout|timed out", "no answer"),
    (r"failed to negotiate", "the program that answers there is not a libp2p peer"),
)


def explain_dial(message: str) -> str:
    """Translate p2pd's message about a failed dial into a few words."""
    for pattern, reason in _DIAL_REASONS:
        if match := re.search(pattern, message):
            return match.expand(reason)
    return message.strip().rpartition("\n")[2]


async def dial(control_path: str, peer_id: str, maddrs: list[str], timeout_s: float) -> None:
    """Have p2pd connect to a peer, if it is not connected yet. Raises PeerLostError if it cannot be reached in time.

    Malformed addresses in `maddrs` are ignored. If it is empty, libp2p's own DHT is asked.
    """
    connecting = p2pd_pb2.ConnectRequest(
        peer=peer_id_bytes(peer_id), addrs=hints(maddrs, peer_id), timeout=math.ceil(timeout_s)
    )
    await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting), timeout_s)


async def dial_initial_peers(control_path: str, initial_peers: tuple[str, ...]) -> list[str]:
    """Connect to all initial peers at once; return the connected ids shortly after the first connection.

    Raises UnreachableError if none can be reached. The message gives the reason for each. Takes at most 10 s.
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
        found = "; ".join(f"{maddr} ({explain_dial(message)})" for maddr, message in failures.items())
        raise UnreachableError(
            f"no initial peer can be reached: {found}. Check that the peer is running, that address and port are "
            "those that it printed, and that no firewall blocks the connection"
        )
    return connected


def ways_in(config: NetworkConfig) -> tuple[str, ...]:
    """All addresses to join through, each once."""
    return tuple(dict.fromkeys((*config.initial_peers, *config.remembered_peers)))


async def connected_peers(control_path: str) -> list[str]:
    """Ids of all peers that p2pd is connected to. Raises PeerLostError when p2pd does not answer."""
    return list(dict.fromkeys(peer_id for peer_id, _ in await connections(control_path, DIAL_TIMEOUT_S)))


async def refuse_taken_identity(
    config: NetworkConfig, peer_id: str, directory: Path, *, own: tuple[str, ...], ask: bool
) -> None:
    """Check that no other peer in the network uses our identity.

    Two peers with one identity break each other's connections. The check takes 0.3 s and a second daemon with a
    temporary identity, because a libp2p peer cannot look itself up. `own` are initial peers with our own id, where no
    peer should answer. `ask`: whether to ask the other initial peers.

    Raises:
        ConfigError: another peer uses the identity.
        UnreachableError: no initial peer can be reached.
    """
    async with run_daemon(probe_flags(), directory / "probe.sock", config.startup_timeout_s) as daemon:
        taken = bool(own) and await _is_reachable(daemon.control_path, peer_id, list(own))
        if not taken and ask and ways_in(config):
            await dial_initial_peers(daemon.control_path, ways_in(config))
            taken = await _is_reachable(daemon.control_path, peer_id, [])
    if taken:
        raise ConfigError(
            f"identity {config.identity} is already taken by a peer in this network ({peer_id}); stop that peer, "
            "or give each peer its own identity file"
        )


async def _is_reachable(control_path: str, peer_id: str, maddrs: list[str]) -> bool:
    with trio.move_on_after(FIND_TIMEOUT_S):
        while True:
            try:
                await dial(control_path, peer_id, maddrs, FIND_TIMEOUT_S)
            except PeerLostError as error:
                # libp2p's DHT learns of its first peer shortly after the connection.
                if "failed to find any peer in table" not in str(error):
                    return False
                await trio.sleep(0.02)
            else:
                return True
    return False
