"""All of a peer's networking in one block: identity, libp2p daemon, DHT, streams; closed in the reverse order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.network.addresses import (
    check_announce_maddrs,
    check_host_maddrs,
    check_initial_peers,
    has_public_address,
)
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
    """What `open_network` gives: who we are, our streams, and the shared directory.

    All stay what they are when the libp2p daemon dies and another takes its place.
    """

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
        """Why we are cut off for good; None while there is a libp2p daemon, or may be one again."""
        return self.supervisor.failure

    def tell(self, events: Events) -> None:
        """From now on have `events` called, on the network thread, with each death and restart of the daemon."""
        self.supervisor.on_event = events


@contextlib.asynccontextmanager
async def open_network(config: NetworkConfig, *, alone: bool = False) -> AsyncIterator[Network]:
    """Join the network until the block is left; then, or when entering fails, no process and no socket is left.

    To be entered in a task of the network thread.

    Args:
        config: how to meet it.
        alone: do not ask for the initial peers at the start: nobody may be there. They are looked for from then on.

    Raises:
        ConfigError: an address, the identity or the machine's clock does not do.
        UnreachableError: no initial peer can be reached. At most 25 s go by before it is known.
    """
    check_initial_peers((*config.initial_peers, *config.remembered_peers))
    check_host_maddrs(config.host_maddrs)
    check_announce_maddrs(config.announce_maddrs)
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        identity = stack.enter_context(hold_identity(config.identity, scratch))
        # One list of initial peers may be given to all peers, those on it included.
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
        public = has_public_address(config.host_maddrs, config.announce_maddrs)
        relays = None if public else Relays(str(control_path))
        relay = Relay(str(control_path), config.relay_peers) if public and config.relay_peers else None
        libp2p = open_libp2p(identity.peer_id, str(control_path), scratch, relays, relay)
        transport = await stack.enter_async_context(libp2p)
        supervisor = Supervisor(config, identity, control_path, transport, directory, alone=alone)
        background = await stack.enter_async_context(open_background())
        await background.start(supervisor.run)
        yield Network(transport, directory, supervisor)
