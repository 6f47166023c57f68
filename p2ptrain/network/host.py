"""A peer's network: identity, transport and directory, and the libp2p daemon that they use.

The transport (`LibP2P`) has authenticated, encrypted streams between peers. The daemon (p2pd) is a separate process
that can crash or be killed. It is then restarted with the same identity, and transport and directory are connected to
the new one. The protocol sees an outage of a few seconds: its links break and are dialled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import trio

from p2ptrain.error_log import ErrorLog, innermost
from p2ptrain.errors import ConfigError, PeerLostError, TransientError
from p2ptrain.network import addresses
from p2ptrain.network._hivemind import Multiaddr, p2pd_pb2
from p2ptrain.network.addresses import keep_ports, on_last_ports, peer_id_bytes, ways_in
from p2ptrain.network.bulk import TlsBulk
from p2ptrain.network.daemon import (
    CONTROL_TIMEOUT_S,
    Daemon,
    ask,
    dial,
    dial_initial_peers,
    identify,
    open_stream,
    own_maddrs,
    peer_flags,
    refuse_taken_identity,
    run_daemon,
)
from p2ptrain.network.dht import HivemindDirectory, join_dht
from p2ptrain.network.identity import Identity, Signatures, hold_identity
from p2ptrain.network.leftovers import scratch_directory
from p2ptrain.network.punch import PUNCH, Puncher
from p2ptrain.network.relay import HOP, RENEW_EVERY_S, Relay, Reservations
from p2ptrain.network.socket_stream import SocketStream
from p2ptrain.network.thread import from_asyncio, open_background
from p2ptrain.network.ways import RATE, RateCounter
from p2ptrain.protocol.restarts import Restarts
from p2ptrain.protocol.wire.transport import Refusal
from p2ptrain.settings.access import Access
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

PROTOCOL_NAME = "p2ptrain/1"
# Dialling through two NATs takes seconds; a peer that takes longer than this counts as lost.
OPEN_TIMEOUT_S = 10.0
# Incoming streams that are not accepted yet; more are refused.
ACCEPT_QUEUE = 64
# How long streams may take to pass their last bytes to p2pd when we leave.
CLOSE_TIMEOUT_S = 1.0
# A router's port mapping, or an address reported by other peers, appears some seconds after the start.
REFRESH_MADDRS_S = 15.0
# After so many unanswered requests in a row, each of CONTROL_TIMEOUT_S, a daemon is killed. Time in suspend does not
# count: a daemon answers at once after it.
MAX_UNANSWERED = 3
# Limit for the first reservations at relays, which delay the start; peers just dialled answer within a round trip.
FIRST_RESERVATIONS_S = 2.0
# Delay before each restart. Few, because repeated failures usually have a lasting cause.
RESTART_AFTER_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# How often the lists of allowed and refused peers are read: a ban should work within seconds.
READ_ACCESS_EVERY_S = 2.0
# After a daemon that ran this long, restarts are counted from zero again (guess).
STABLE_S = 60.0


class LibP2P:
    """Opens and accepts streams of this peer: implements `protocol.wire.transport.Transport`.

    It outlives its daemon: when the daemon dies all streams break, and streams work again with the next daemon.

    Attributes:
        peer_id: our identity, base58.
        maddrs: addresses under which other peers can dial us, ending in /p2p/<peer id>, loopback last.
        control_path: socket at which daemons take requests.
    """

    def __init__(self, config: NetworkConfig, identity: Identity, directory: Path, refusal: Refusal) -> None:
        """
        Args:
            config: our addresses. If none is public, we need reservations at relays; otherwise we may be one.
            identity: ours.
            directory: for the sockets.
            refusal: why a peer is refused: we neither relay for it nor through it, and count no bytes for it.
        """
        self.peer_id = identity.peer_id
        self.maddrs: list[str] = []
        signatures = Signatures(identity)
        self.sign, self.verify = signatures.sign, signatures.verify
        self.control_path = str(directory / "p2pd.sock")
        self._streams_path = str(directory / "streams.sock")
        self._errors = ErrorLog(logger)
        self._reservations: Reservations | None = None
        self._puncher: Puncher | None = None
        self._relay: Relay | None = None
        self._rate_counter = RateCounter(refusal)
        self._takes: dict[str, Callable[[SocketStream], None]] = {RATE: self._rate_counter.take}
        if not addresses.has_public_address(config.host_maddrs, config.announce_maddrs):
            self._reservations = Reservations(self.control_path, refusal)
            relays = self._reservations.relays
            self._puncher = Puncher(self.control_path, self.peer_id, lambda: self.maddrs, relays, refusal)
            self._takes[PUNCH] = self._puncher.take
        elif config.relay_peers:
            self._relay = Relay(self.control_path, config.relay_peers, config.relay_mbit, refusal)
            self._takes |= {HOP: self._relay.take, PUNCH: self._relay.take_punch}
        self._online = trio.Event()
        self._streams: set[SocketStream] = set()
        self._waiting, self._incoming = trio.open_memory_channel[SocketStream](ACCEPT_QUEUE)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Take incoming streams from any daemon of our identity, through a socket of ours, until the block ends."""
        loop = asyncio.get_running_loop()
        serving = loop.create_unix_server(lambda: SocketStream(self._take, among=self._streams), self._streams_path)  # type: ignore
        server = await from_asyncio(serving)
        try:
            yield
        finally:
            server.close()

    async def open_stream(self, peer_id: str, maddrs: list[str]) -> SocketStream:
        """Open a stream. Raises PeerLostError if that takes over 10 s, or the peer does not speak our protocol.

        `maddrs` are possible addresses of a peer that is not connected yet; malformed ones are ignored.
        """
        try:
            peer_id_bytes(peer_id)
        except ValueError:
            raise PeerLostError(f"{peer_id!r} is not a peer id") from None
        with trio.move_on_after(OPEN_TIMEOUT_S):
            await self._online.wait()
            if maddrs:
                if self._puncher is not None:
                    await self._puncher.reach(peer_id, maddrs)
                await dial(self.control_path, peer_id, maddrs, OPEN_TIMEOUT_S)
            return await open_stream(self.control_path, peer_id, PROTOCOL_NAME, OPEN_TIMEOUT_S, among=self._streams)
        raise PeerLostError(f"timeout: {peer_id} was not reached within {OPEN_TIMEOUT_S:g} s")

    def relay_to(self, peer_id: str) -> str:
        """The peer that carries all streams with this one; empty if there is a direct one, or none."""
        return min((stream.relay for stream in self._streams if stream.remote == peer_id), default="")

    async def accept(self) -> SocketStream:
        """Wait for the next stream that another peer opened."""
        return await self._incoming.receive()

    @contextlib.asynccontextmanager
    async def through(self, daemon: Daemon) -> AsyncIterator[None]:
        """Use a running daemon until the block ends; then all streams are closed.

        Raises PeerLostError if the daemon does not answer.
        """
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self._streams_path}").to_bytes(), proto=[PROTOCOL_NAME, *self._takes], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        try:
            await ask(self.control_path, request, CONTROL_TIMEOUT_S)
            if self._reservations is not None:
                with trio.move_on_after(FIRST_RESERVATIONS_S):
                    await self._reservations.renew()
            await self._refresh_maddrs()
            async with open_background() as background:
                if self._reservations is not None:
                    background.start_soon(self._keep_reservations, self._reservations)
                for service in (self._rate_counter, self._relay, self._puncher):
                    if service is not None:
                        background.start_soon(service.serve)
                background.start_soon(self._keep_maddrs, daemon)
                background.start_soon(self._watch, daemon)
                self._online.set()
                yield
        finally:
            self._go_offline()
            await self._close_streams()

    def _take(self, stream: SocketStream, message: bytes) -> None:
        """Take an incoming stream, for `accept`, the relay or the puncher. `message` names the peer."""
        info = p2pd_pb2.StreamInfo.FromString(message)
        identify(stream, info)
        if (take := self._takes.get(info.proto)) is not None:
            take(stream)
            return
        try:
            self._waiting.send_nowait(stream)
        except trio.WouldBlock:
            logger.warning("refused a stream from %s: %d are waiting to be accepted", stream.remote, ACCEPT_QUEUE)
            stream.fail("too many streams")

    def _go_offline(self) -> None:
        if self._online.is_set():
            self._online = trio.Event()

    def _break_streams(self, reason: str) -> None:
        for stream in list(self._streams):
            stream.fail(reason)

    async def _close_streams(self) -> None:
        """Close all streams, and wait until p2pd has read their last bytes."""
        with trio.CancelScope(shield=True):
            for stream in list(self._streams):
                await stream.aclose()
            with trio.move_on_after(CLOSE_TIMEOUT_S):
                while self._streams:
                    await trio.sleep(0.005)
        self._break_streams("the network was closed")

    async def _refresh_maddrs(self) -> None:
        relayed = self._reservations.maddrs if self._reservations else []
        self.maddrs = await own_maddrs(self.control_path, self.peer_id, relayed)

    async def _keep_maddrs(self, daemon: Daemon) -> None:
        """Refresh our addresses. A daemon that does not answer is killed, so that it is restarted."""
        unanswered = 0
        while unanswered < MAX_UNANSWERED:
            await trio.sleep(REFRESH_MADDRS_S)
            with self._errors.containing("reading our addresses"):
                try:
                    await self._refresh_maddrs()
                    unanswered = 0
                except PeerLostError:
                    unanswered += 1
        logger.warning("the libp2p daemon (p2pd) does not answer; killing it")
        daemon.process.kill()

    async def _keep_reservations(self, reservations: Reservations) -> None:
        while True:
            await trio.sleep(RENEW_EVERY_S)
            with self._errors.containing("renewing reservations at relays"), contextlib.suppress(PeerLostError):
                await reservations.renew()
                await self._refresh_maddrs()

    async def _watch(self, daemon: Daemon) -> None:
        await daemon.exited.wait()
        self._go_offline()
        self._break_streams("the libp2p daemon has died")


def ignore(event: str, /, **fields: object) -> None:
    """Writes nothing, while nobody records events."""


class Network:
    """An open network, made by `open_network`. Owns the daemon, and connects transport and directory to it.

    Attributes:
        transport, directory: the same objects through all restarts of the daemon.
        bulk: opens and accepts bulk connections; None: off.
        peer_id: our identity, base58.
        access: the peers that this machine refuses; kept up to date with its files.
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
                    lived_s = trio.current_time() - began_s
                    reason = f"exit status {daemon.process.returncode}"
            except Exception as error:
                if not has_started:
                    raise
                lived_s, reason = 0.0, str(error)
                if not isinstance(error, ConfigError):  # a bug of ours or of a library costs this daemon only
                    reason = repr(innermost(error))
                    self._errors.note("using the libp2p daemon; it is replaced", error)
            if (delay_s := restarts.next_delay_s(lived_s)) is None:
                break
            self._tell(status="died", reason=reason)
            logger.warning("the libp2p daemon (p2pd) died (%s); restarting it", reason)
            await trio.sleep(delay_s)
            host_maddrs = self._config.host_maddrs
            if restarts.count == 1:  # on the ports that other peers know, if they are still free
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
        """Record each death and restart of the daemon with `write` (`Sink.write`), on the network thread."""
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
        """A daemon with transport and directory connected; with `reach`, it must reach an initial peer first."""
        flags = peer_flags(config, self._identity.path)
        async with run_daemon(flags, Path(self.transport.control_path), config.startup_timeout_s) as daemon:
            try:
                connected = await dial_initial_peers(daemon.control_path, ways_in(config)) if reach else []
                # p2pd ends with the DHT's connection to it, so that connection is closed last.
                joining = join_dht(daemon, self._identity, config, connected)
                async with joining as node, self.transport.through(daemon):
                    with self.directory.through(node):
                        yield daemon
            except PeerLostError as error:
                raise TransientError(f"the libp2p daemon ended right after its start ({error}); try again") from None


@contextlib.asynccontextmanager
async def open_network(config: NetworkConfig, *, alone: bool = False) -> AsyncIterator[Network]:
    """Join the network until the block ends. Leaves no process and no socket behind, also when entering fails.

    Call it in a task of the network thread.

    Args:
        config: addresses, identity and initial peers.
        alone: start even if no initial peer can be reached; they are tried again from then on.

    Raises:
        ConfigError: an address, a port, the identity, a file of peer ids or the machine's clock is unusable.
        UnreachableError: no initial peer can be reached. Takes at most 25 s.
    """
    access = Access(config)
    addresses.check_initial_peers((*config.initial_peers, *config.remembered_peers))
    addresses.check_host_maddrs(config.host_maddrs)
    addresses.check_announce_maddrs(config.announce_maddrs)
    with scratch_directory() as scratch, hold_identity(config.identity, scratch) as identity:
        # All peers may be given the same list of initial peers, so it may contain our own addresses.
        own = tuple(maddr for maddr in config.initial_peers if maddr.endswith(f"/p2p/{identity.peer_id}"))
        config = dataclasses.replace(
            config,
            initial_peers=tuple(m for m in config.initial_peers if m not in own),
            remembered_peers=tuple(m for m in config.remembered_peers if not m.endswith(f"/p2p/{identity.peer_id}")),
        )
        if (own or (ways_in(config) and not alone)) and not identity.is_new:
            await refuse_taken_identity(config, identity.peer_id, scratch, own=own, ask_others=not alone)
        network = Network(config, identity, scratch, access, alone=alone)
        bulk = network.bulk.listening() if network.bulk is not None else contextlib.nullcontext()
        async with network.transport.listening(), bulk, open_background() as background:
            await background.start(network.run)
            background.start_soon(network.keep_access)
            yield network
