"""`protocol.wire.transport.Transport` over the libp2p daemon: authenticated, encrypted streams between peers.

Beside the streams of our protocol, the daemon passes us those that peers open for other services of this peer: a relay,
direct connections between routers, and the count of an upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr, p2pd_pb2
from p2ptrain.network.addresses import by_peer_id, has_public_address, peer_id_bytes, ways_in
from p2ptrain.network.daemon import CONTROL_TIMEOUT_S, Daemon, ask, dial, identify, open_stream, own_maddrs
from p2ptrain.network.dial_back import ASK_SOON_S, DialBack, DialBacks, Standing
from p2ptrain.network.identity import Identity, Signatures
from p2ptrain.network.punch import PUNCH, Puncher
from p2ptrain.network.relay import HOP, RENEW_EVERY_S, Relay, Reservations
from p2ptrain.network.socket_stream import SocketStream
from p2ptrain.network.thread import from_asyncio, open_background
from p2ptrain.network.ways import RATE, RateCounter
from p2ptrain.protocol.membership.reachability import is_direct_public, is_public
from p2ptrain.protocol.wire.transport import Refusal
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
# A dial-back that reached us is told within some round trips, one that failed only after 15 s. So if none is told in
# this time, we take places at relays, before we announce an address that others would dial in vain.
FIRST_DIAL_BACK_S = 3.0


class LibP2P:
    """Opens and accepts streams of this peer: implements `protocol.wire.transport.Transport`.

    It outlives its daemon: all streams break when the daemon dies, and new ones can be opened with the next daemon.

    Attributes:
        peer_id: our identity, base58.
        maddrs: addresses under which other peers can dial us, ending in /p2p/<peer id>, loopback last.
        control_path: socket at which daemons take requests.
    """

    def __init__(self, config: NetworkConfig, identity: Identity, directory: Path, refusal: Refusal) -> None:
        """
        Args:
            config: our addresses. If none is public, or other peers cannot dial those, we need reservations at relays;
                otherwise we may be one. A public one in `announce_maddrs` is taken to be reachable.
            identity: ours.
            directory: for the sockets.
            refusal: says why a peer is refused. We relay neither for it nor through it, and measure no rate for it.
        """
        self.peer_id = identity.peer_id
        self.maddrs: list[str] = []
        signatures = Signatures(identity)
        self.sign, self.verify = signatures.sign, signatures.verify
        self.control_path = str(directory / "p2pd.sock")
        self._streams_path = str(directory / "streams.sock")
        self._errors = ErrorLog(logger)
        self._reservations = Reservations(self.control_path, refusal)
        self._renewing = trio.Lock()
        has_public = has_public_address(config.host_maddrs, config.announce_maddrs)
        has_ip4 = has_public_address([maddr for maddr in config.host_maddrs if maddr.startswith("/ip4/")], ())
        relays, maddrs = self._reservations.relays, lambda: self.maddrs
        self._puncher = Puncher(self.control_path, self.peer_id, maddrs, relays, refusal, has_public_ip4=has_ip4)
        self._relay: Relay | None = None
        # Nobody dials a private address; an announced one is believed; of any other, peers elsewhere are asked.
        self._fixed = Standing({"ip4": DialBack.REACHED if has_public else DialBack.FAILED})
        self._dial_backs: DialBacks | None = None
        rates = RateCounter(refusal)
        self._services = [rates.service, self._puncher.service]
        self._takes: dict[str, Callable[[SocketStream], None]] = {RATE: rates.take, PUNCH: self._take_punch}
        if has_public and not is_public(config.announce_maddrs):
            known = by_peer_id(ways_in(config))
            self._dial_backs = DialBacks(self.control_path, self.peer_id, maddrs, refusal, known)
        if has_public and config.relay_peers:
            self._relay = Relay(self.control_path, config.relay_peers, config.relay_mbit, refusal)
            self._services.append(self._relay.service)
            self._takes[HOP] = self._take_hop
        self._online = trio.Event()
        self._streams: set[SocketStream] = set()
        self._waiting, self._incoming = trio.open_memory_channel[SocketStream](ACCEPT_QUEUE)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Until the block ends, take incoming streams from our daemons, through a socket of ours."""
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
                if self._standing.needs_relays:
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
            await self._refresh_maddrs()
            async with open_background() as background:
                if self._dial_backs is not None:
                    background.start_soon(self._keep_dial_backs, self._dial_backs)
                    with trio.move_on_after(FIRST_DIAL_BACK_S):
                        await self._dial_backs.told.wait()
                with trio.move_on_after(FIRST_RESERVATIONS_S):
                    await self._renew()
                await self._refresh_maddrs()
                background.start_soon(self._keep_reservations)
                for service in self._services:
                    background.start_soon(service.serve)
                background.start_soon(self._keep_maddrs, daemon)
                background.start_soon(self._watch, daemon)
                self._online.set()
                yield
        finally:
            self._go_offline()
            await self._close_streams()

    def _take(self, stream: SocketStream, message: bytes) -> None:
        """Pass an incoming stream to a service or to `accept`. `message` names the peer and the protocol."""
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

    def _take_hop(self, stream: SocketStream) -> None:
        if self._relay is not None and not self._standing.is_shut:
            self._relay.take(stream)
        else:
            stream.fail("no relay, as peers elsewhere cannot dial this one")

    def _take_punch(self, stream: SocketStream) -> None:
        """Pass on a request for a direct connection, of a relay of ours or of a peer for which we are one."""
        # A peer that is our relay is taken to speak as one.
        if self._relay is None or self._standing.is_shut or stream.remote in self._reservations.relays():
            self._puncher.take(stream)
        else:
            self._relay.take_punch(stream)

    @property
    def _standing(self) -> Standing:
        return self._fixed if self._dial_backs is None else self._dial_backs.standing

    def _go_offline(self) -> None:
        if self._online.is_set():  # else some may be waiting for the present event
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
        self.maddrs = await own_maddrs(self.control_path, self.peer_id, self._reservations.maddrs)

    async def _keep_maddrs(self, daemon: Daemon) -> None:
        """Refresh our addresses. A daemon that does not answer is killed, so that it is restarted."""
        unanswered = 0
        while unanswered < MAX_UNANSWERED:
            await trio.sleep(REFRESH_MADDRS_S)
            daemon.end_if_outgrown()
            with self._errors.containing("reading our addresses"):
                try:
                    await self._refresh_maddrs()
                    unanswered = 0
                except PeerLostError:
                    unanswered += 1
        logger.warning("the libp2p daemon (p2pd) does not answer; killing it")
        daemon.process.kill()

    async def _keep_reservations(self) -> None:
        while True:
            await trio.sleep(RENEW_EVERY_S)
            with self._errors.containing("renewing reservations at relays"), contextlib.suppress(PeerLostError):
                await self._renew()
                await self._refresh_maddrs()

    async def _renew(self) -> None:
        """Renew our reservations, or drop them if we need none. Raises PeerLostError."""
        async with self._renewing:
            if self._standing.needs_relays:
                await self._reservations.renew()
            else:
                self._reservations.drop()

    async def _keep_dial_backs(self, dial_backs: DialBacks) -> None:
        """Have peers dial us back, and take places at relays while they fail."""
        while True:
            wait_s, before = ASK_SOON_S, dial_backs.standing
            with self._errors.containing("asking for dial-backs"), contextlib.suppress(PeerLostError):
                wait_s = await dial_backs.ask()
                self._tell_standing(before)
                if dial_backs.standing.needs_relays != before.needs_relays:
                    await self._renew()
                    await self._refresh_maddrs()
            await trio.sleep(wait_s)

    def _tell_standing(self, before: Standing) -> None:
        now = self._standing.shut_families
        direct = [maddr.partition("/p2p/")[0] for maddr in self.maddrs if is_direct_public(maddr)]
        if shut := [maddr for maddr in direct if maddr.split("/")[1] in now - before.shut_families]:
            logger.warning(
                "peers in other networks cannot dial %s: a firewall blocks it. This peer now uses relays, and direct "
                "connections that both ends dial at once. To be dialled, open this TCP port in the firewall of this "
                "machine, and in the provider's",
                ", ".join(shut),
            )
        elif before.shut_families and not now:
            logger.info("peers in other networks can dial this peer now; it uses no relays")

    async def _watch(self, daemon: Daemon) -> None:
        await daemon.exited.wait()
        self._go_offline()
        self._break_streams("the libp2p daemon has died")
