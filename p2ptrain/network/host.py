"""Opens a peer's networking: identity, libp2p daemon, DHT and streams; closes them in the reverse order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.network import addresses
from p2ptrain.network.background import open_background
from p2ptrain.network.bootstrap import refuse_taken_identity, ways_in
from p2ptrain.network.dht import HivemindDirectory
from p2ptrain.network.identity import hold_identity
from p2ptrain.network.p2p import LibP2P, open_libp2p
from p2ptrain.network.relay import Relay
from p2ptrain.network.relays import Relays
from p2ptrain.network.scratch import scratch_directory
from p2ptrain.network.supervisor import Events, Supervisor
from p2ptrain.settings.peer_config import NetworkConfig


@dataclass(frozen=True)
class Network:
    """An open network: our identity, streams and directory. All survive a restart of the libp2p daemon."""

    transport: LibP2P
    directory: HivemindDirectory
    supervisor: Supervisor

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    @property
    def maddrs(self) -> list[str]:
        return self.transport.maddrs

    @property
    def failure(self) -> ConfigError | None:
        """Why no daemon will be started again; None while one is running or being restarted."""
        return self.supervisor.failure

    def tell(self, events: Events) -> None:
        """Call `events`, on the network thread, with each death and restart of the daemon."""
        self.supervisor.on_event = events


@contextlib.asynccontextmanager
async def open_network(config: NetworkConfig, *, alone: bool = False) -> AsyncIterator[Network]:
    """Join the network until the block ends. Leaves no process and no socket behind, also when entering fails.

    Call it in a task of the network thread.

    Args:
        config: addresses, identity and initial peers.
        alone: start even if no initial peer can be reached; they are tried again from then on.

    Raises:
        ConfigError: an address, the identity or the machine's clock is unusable.
        UnreachableError: no initial peer can be reached. Takes at most 25 s.
    """
    addresses.check_initial_peers((*config.initial_peers, *config.remembered_peers))
    addresses.check_host_maddrs(config.host_maddrs)
    addresses.check_announce_maddrs(config.announce_maddrs)
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        identity = stack.enter_context(hold_identity(config.identity, scratch))
        # All peers may be given the same list of initial peers, so it may contain our own addresses.
        own = tuple(maddr for maddr in config.initial_peers if maddr.endswith(f"/p2p/{identity.peer_id}"))
        config = dataclasses.replace(
            config,
            initial_peers=tuple(m for m in config.initial_peers if m not in own),
            remembered_peers=tuple(m for m in config.remembered_peers if not m.endswith(f"/p2p/{identity.peer_id}")),
        )
        if (own or (ways_in(config) and not alone)) and not identity.is_new:
            await refuse_taken_identity(config, identity.peer_id, scratch, own=own, ask=not alone)
        control_path = scratch / "p2pd.sock"
        directory = HivemindDirectory(identity)
        public = addresses.has_public_address(config.host_maddrs, config.announce_maddrs)
        relays = None if public else Relays(str(control_path))
        relay = Relay(str(control_path), config.relay_peers) if public and config.relay_peers else None
        libp2p = open_libp2p(identity.peer_id, str(control_path), scratch, relays, relay)
        transport = await stack.enter_async_context(libp2p)
        supervisor = Supervisor(config, identity, control_path, transport, directory, alone=alone)
        background = await stack.enter_async_context(open_background())
        await background.start(supervisor.run)
        yield Network(transport, directory, supervisor)
