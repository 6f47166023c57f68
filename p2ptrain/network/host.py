"""A peer's network: identity, transport, directory and bulk connections, and the libp2p daemon that they use.

The daemon (p2pd) is a separate process that can crash or be killed. It is then restarted with the same identity, and
transport and directory are connected to the new one. The protocol sees an outage of a few seconds: its links break and
are dialled again.

p2pd could dial the initial peers at its start, but it dials them one by one, gives no reasons for failures, and retries
only after 15 minutes. Here all are dialled at once, within seconds, with a reason for each failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import trio

from p2ptrain.error_log import ErrorLog, innermost
from p2ptrain.errors import ConfigError, PeerLostError, TransientError, UnreachableError
from p2ptrain.network import addresses
from p2ptrain.network.addresses import by_peer_id, keep_ports, on_last_ports, ways_in
from p2ptrain.network.bulk import TlsBulk
from p2ptrain.network.daemon import (
    DIAL_TIMEOUT_S,
    Daemon,
    dial,
    explain_dial,
    peer_flags,
    probe_flags,
    run_daemon,
)
from p2ptrain.network.dht import HivemindDirectory, join_dht
from p2ptrain.network.identity import Identity, hold_identity
from p2ptrain.network.process_lifetime import scratch_directory
from p2ptrain.network.thread import open_background
from p2ptrain.network.transport import LibP2P
from p2ptrain.protocol.restarts import Restarts
from p2ptrain.settings.access import Access
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

# Delay before each restart. Few, because repeated failures usually have a lasting cause.
RESTART_AFTER_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# After a daemon that ran this long, restarts are counted from zero again (guess).
STABLE_S = 60.0
# How often the lists of allowed and refused peers are read: a ban should work within seconds.
READ_ACCESS_EVERY_S = 2.0
# Once one initial peer is connected, the reachable ones follow within a round trip or two.
STRAGGLERS_S = 0.5
# The initial peer usually knows a peer with our identity, and then answers in milliseconds.
FIND_TIMEOUT_S = 3.0


def ignore(event: str, /, **fields: object) -> None:
    """Ignores an event: the default without a recorder."""


class Network:
    """An open network, made by `open_network`. Owns the daemon, and connects transport and directory to it.

    Attributes:
        transport, directory: stay the same when the daemon is restarted.
        bulk: opens and accepts bulk connections; None if the user has turned them off.
        peer_id: our identity, base58.
        access: which peers this machine refuses; follows its files.
        failure: why no daemon will be started again; None until then.
    """

    def __init__(
        self, config: NetworkConfig, identity: Identity, scratch: Path, access: Access, *, alone: bool
    ) -> None:
        self.peer_id = identity.peer_id
        self.access = access
        self.transport = LibP2P(config, identity, scratch, access.refusal)
        self.directory = HivemindDirectory(identity)
        self.bulk = (
            TlsBulk(identity.peer_id, config.host_maddrs, config.bulk_port, scratch) if config.bulk == "on" else None
        )
        self._write: Callable[..., object] = ignore
        self.failure: ConfigError | None = None
        self._errors = ErrorLog(logger)
        self._config = config
        self._identity = identity
        self._alone = alone

    @property
    def maddrs(self) -> list[str]:
        """Addresses that other peers can dial, loopback last."""
        return self.transport.maddrs

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep a daemon running until cancelled, or until too many restarts have failed.

        Raises:
            ConfigError: the first daemon did not start.
            UnreachableError: no initial peer can be reached.
        """
        restarts, has_started = Restarts(RESTART_AFTER_S, STABLE_S), False
        host_maddrs = on_last_ports(self._config.host_maddrs, self._identity.path)
        config = dataclasses.replace(self._config, host_maddrs=host_maddrs)
        while True:
            try:
                if has_started:
                    addresses.check_host_maddrs(config.host_maddrs)
                async with self._online(config, reach=not has_started and not self._alone) as daemon:
                    began_s = trio.current_time()
                    keep_ports(self.maddrs, self._identity.path)
                    if has_started:
                        self._tell(status="restarted", reason="")
                        logger.warning("the libp2p daemon (p2pd) is running again, with the same identity")
                    else:
                        has_started = True
                        task_status.started()
                    await daemon.exited.wait()
                    # What strangers fill is no lasting cause.
                    lived_s = math.inf if daemon.has_outgrown else trio.current_time() - began_s
                    reason = f"exit status {daemon.process.returncode}"
            except Exception as error:
                if not has_started:
                    raise
                lived_s, reason = 0.0, str(error)
                if not isinstance(error, ConfigError):  # a bug of ours or of a library: it costs this daemon only
                    reason = repr(innermost(error))
                    self._errors.note("using the libp2p daemon; it is replaced", error)
            if (delay_s := restarts.next_delay_s(lived_s)) is None:
                break
            self._tell(status="died", reason=reason)
            logger.warning("the libp2p daemon (p2pd) died (%s); restarting it", reason)
            await trio.sleep(delay_s)
            host_maddrs = self._config.host_maddrs
            if restarts.count == 1:  # try the ports that other peers know
                host_maddrs = addresses.with_ports_of(host_maddrs, self.transport.maddrs)
            config = dataclasses.replace(self._config, host_maddrs=host_maddrs)
        self.failure = TransientError(
            f"the libp2p daemon (p2pd) died, and {restarts.count} restarts did not help ({reason}); "
            "fix the cause, then run the same command again"
        )
        self._tell(status="failed", reason=reason)
        logger.error("%s", self.failure)

    async def keep_access(self) -> None:
        """Read the files of refused peers again when they change, until cancelled."""
        while self.access.has_files:
            await trio.sleep(READ_ACCESS_EVERY_S)
            with self._errors.containing("reading the lists of peers"):
                await trio.to_thread.run_sync(self.access.refresh, abandon_on_cancel=True)

    @contextlib.contextmanager
    def recording(self, write: Callable[..., object]) -> Iterator[None]:
        """Until the block ends, pass each death and restart of the daemon to `write`, on the network thread."""
        self._write = write
        try:
            yield
        finally:
            self._write = ignore

    def _tell(self, *, status: str, reason: str) -> None:
        with self._errors.containing("recording an event of the libp2p daemon"):
            self._write("daemon", status=status, reason=reason)

    @contextlib.asynccontextmanager
    async def _online(self, config: NetworkConfig, *, reach: bool) -> AsyncIterator[Daemon]:
        """Run a daemon with transport and directory connected to it.

        With `reach`, it must reach an initial peer first.
        """
        flags = peer_flags(config, self._identity.path)
        async with run_daemon(flags, Path(self.transport.control_path), config.startup_timeout_s) as daemon:
            try:
                connected = await dial_initial_peers(daemon.control_path, ways_in(config)) if reach else []
                # p2pd ends with the DHT's connection to it, so that connection is closed last.
                joining = join_dht(daemon, self._identity, config, connected)
                async with joining as node, self.transport.through(daemon):
                    alone = self._alone or not config.initial_peers
                    with self.directory.through(node, may_be_alone=alone):
                        yield daemon
            except PeerLostError as error:
                raise TransientError(f"the libp2p daemon ended right after its start ({error}); try again") from None


@contextlib.asynccontextmanager
async def open_network(config: NetworkConfig, *, alone: bool = False) -> AsyncIterator[Network]:
    """Be part of the network until the block ends. Leaves no process and no socket behind, also when entering fails.

    Call it in a task of the network thread.

    Args:
        config: addresses, identity and initial peers.
        alone: start even if no initial peer can be reached; they are tried again from then on.

    Raises:
        ConfigError: an address, a port, the identity, a file of peer ids or the machine's clock is unusable.
        UnreachableError: no initial peer can be reached. Takes at most 25 s.
    """
    access = Access(config)
    addresses.check_initial_peers(ways_in(config))
    addresses.check_host_maddrs(config.host_maddrs)
    addresses.check_announce_maddrs(config.announce_maddrs)
    with scratch_directory() as scratch, hold_identity(config.identity, scratch) as identity:
        # All peers may be given the same list of initial peers, so it may contain our own addresses.
        ours = f"/p2p/{identity.peer_id}"
        own = tuple(maddr for maddr in config.initial_peers if maddr.endswith(ours))
        config = dataclasses.replace(
            config,
            initial_peers=tuple(maddr for maddr in config.initial_peers if not maddr.endswith(ours)),
            remembered_peers=tuple(maddr for maddr in config.remembered_peers if not maddr.endswith(ours)),
        )
        if (own or (ways_in(config) and not alone)) and not identity.is_new:
            await refuse_taken_identity(config, identity.peer_id, scratch, own=own, ask_others=not alone)
        network = Network(config, identity, scratch, access, alone=alone)
        bulk = network.bulk.listening() if network.bulk is not None else contextlib.nullcontext()
        async with network.transport.listening(), bulk, open_background() as background:
            await background.start(network.run)
            background.start_soon(network.keep_access)
            yield network


async def dial_initial_peers(control_path: str, initial_peers: tuple[str, ...]) -> list[str]:
    """Connect to all initial peers at once; return the connected ids shortly after the first connection.

    Raises UnreachableError if none can be reached. The message gives the reason for each. Takes at most 10 s.
    """
    maddrs_of = by_peer_id(initial_peers)
    connected: list[str] = []
    failures: dict[str, str] = {}

    async def attempt(peer_id: str, scope: trio.CancelScope) -> None:
        try:
            await dial(control_path, peer_id, maddrs_of[peer_id], DIAL_TIMEOUT_S)
        except PeerLostError as error:
            failures[", ".join(maddrs_of[peer_id])] = str(error)
        else:
            connected.append(peer_id)
            scope.deadline = min(scope.deadline, trio.current_time() + STRAGGLERS_S)

    async with trio.open_nursery() as nursery:
        for peer_id in maddrs_of:
            nursery.start_soon(attempt, peer_id, nursery.cancel_scope)
    if maddrs_of and not connected:
        found = "; ".join(f"{maddr} ({explain_dial(message)})" for maddr, message in failures.items())
        raise UnreachableError(
            f"no initial peer can be reached: {found}. Check that the peer is running and the run has not ended, "
            "that address and port are those that it printed, and that no firewall blocks the connection"
        )
    return connected


async def refuse_taken_identity(
    config: NetworkConfig, peer_id: str, directory: Path, *, own: tuple[str, ...], ask_others: bool
) -> None:
    """Check that no other peer in the network uses our identity.

    Two peers with one identity break each other's connections. The check takes 0.3 s and a second daemon with a
    temporary identity, because a libp2p peer cannot look itself up. `own` are initial peers with our own id, where no
    peer should answer. `ask_others`: whether to ask the other initial peers.

    Raises:
        ConfigError: another peer uses the identity.
        UnreachableError: no initial peer can be reached.
    """
    async with run_daemon(probe_flags(), directory / "probe.sock", config.startup_timeout_s) as daemon:
        taken = bool(own) and await _is_reachable(daemon.control_path, peer_id, list(own))
        if not taken and ask_others and ways_in(config):
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
