"""All of a peer's networking in one block: identity, libp2p daemon, DHT, streams; closed in the reverse order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio

from p2ptrain.config import NetworkConfig
from p2ptrain.errors import ConfigError, PeerLostError
from p2ptrain.network.addresses import check_announce_maddrs, check_host_maddrs, check_initial_peers
from p2ptrain.network.bootstrap import dial_initial_peers, refuse_taken_identity
from p2ptrain.network.daemon import peer_flags, run_daemon
from p2ptrain.network.dht import HivemindDirectory, join_dht
from p2ptrain.network.identity import hold_identity
from p2ptrain.network.p2p import LibP2P, serve_libp2p
from p2ptrain.network.scratch import scratch_directory


@dataclass(frozen=True)
class Network:
    """What `open_network` gives: who we are, our streams, and the shared directory."""

    transport: LibP2P
    directory: HivemindDirectory

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    @property
    def maddrs(self) -> list[str]:
        return self.transport.maddrs

    @property
    def failed(self) -> trio.Event:
        """Set when the libp2p daemon has died under us."""
        return self.transport.failed


@contextlib.asynccontextmanager
async def open_network(config: NetworkConfig) -> AsyncIterator[Network]:
    """Join the network until the block is left; then, or when entering fails, no process and no socket is left.

    To be entered in a task of the network thread.

    Raises:
        ConfigError: an address, the identity or the machine's clock does not do, or no initial peer can be reached.
            At most 25 s go by before it is known.
    """
    check_initial_peers(config.initial_peers)
    check_host_maddrs(config.host_maddrs)
    check_announce_maddrs(config.announce_maddrs)
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        identity = stack.enter_context(hold_identity(config.identity, scratch))
        # One list of initial peers may be given to all peers, those on it included.
        others = tuple(maddr for maddr in config.initial_peers if not maddr.endswith(f"/p2p/{identity.peer_id}"))
        config = dataclasses.replace(config, initial_peers=others)
        if config.initial_peers and not identity.is_new:
            await refuse_taken_identity(config, identity.peer_id, scratch)
        starting = run_daemon(peer_flags(config, identity.path), scratch / "p2pd.sock", config.startup_timeout_s)
        daemon = await stack.enter_async_context(starting)
        try:
            connected = await dial_initial_peers(daemon.control_path, config.initial_peers)
            # p2pd ends with the DHT's connection to it, so that one is closed last.
            joining = join_dht(daemon.control_path, identity, config.initial_peers, connected)
            directory = await stack.enter_async_context(joining)
            transport = await stack.enter_async_context(serve_libp2p(daemon, identity.peer_id, scratch))
        except PeerLostError as error:
            raise ConfigError(f"the libp2p daemon ended right after its start ({error}); try again") from None
        yield Network(transport, directory)
