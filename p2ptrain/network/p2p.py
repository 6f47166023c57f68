"""`protocol.transport.Transport` over a libp2p daemon: authenticated, encrypted streams between peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError
from p2ptrain.network import circuit
from p2ptrain.network._hivemind import Multiaddr, PeerID, p2pd_pb2
from p2ptrain.network.addresses import dialable, peer_id_bytes
from p2ptrain.network.background import open_background
from p2ptrain.network.bootstrap import dial
from p2ptrain.network.bridge import from_asyncio
from p2ptrain.network.control import DaemonSocket, ask, open_stream
from p2ptrain.network.daemon import Daemon
from p2ptrain.network.relay import Relay
from p2ptrain.network.relays import RENEW_EVERY_S, Relays

logger = logging.getLogger(__name__)

PROTOCOL_NAME = "p2ptrain/1"
# Dialling through two NATs takes seconds; more than this and the peer is as good as gone.
OPEN_TIMEOUT_S = 10.0
# p2pd's own requests are answered within a millisecond; this is for a machine under heavy load.
CONTROL_TIMEOUT_S = 10.0
# Streams opened by others that nobody has accepted yet; more are refused.
ACCEPT_QUEUE = 64
# How long streams may take to hand their last bytes to p2pd when we leave.
CLOSE_TIMEOUT_S = 1.0
# A router's port mapping, or an address that other peers see us under, shows up some seconds after the start.
REFRESH_MADDRS_S = 15.0
# A daemon that has not answered so many times in a row, each for CONTROL_TIMEOUT_S, hangs and is ended. Only awake time
# counts: on a machine that slept it answers at once.
MAX_UNANSWERED = 3
# Before we relay again after an error of our own.
RELAY_AGAIN_S = 1.0
# Those whom we dial first have just been dialled, and answer within a round trip; more than this does not hold us up.
FIRST_PLACES_S = 2.0


class LibP2P:
    """Opens and accepts streams of this peer. Made by `open_libp2p`.

    It outlives the daemon that it works `through`: when that one has died every stream is broken, and streams are
    opened and accepted again once there is another.

    Attributes:
        peer_id: our identity, base58.
    """

    def __init__(
        self, peer_id: str, control_path: str, streams_path: str, relays: Relays | None, relay: Relay | None
    ) -> None:
        self.peer_id = peer_id
        self._errors = ErrorLog(logger)
        self._relays = relays
        self._relay = relay
        self._control_path = control_path
        self._streams_path = streams_path
        self._online = trio.Event()
        self._maddrs: list[str] = []
        self._streams: set[DaemonSocket] = set()
        self._waiting, self._incoming = trio.open_memory_channel[DaemonSocket](ACCEPT_QUEUE)

    @property
    def maddrs(self) -> list[str]:
        """Addresses under which others can dial us, ending in /p2p/<peer id>, loopback last."""
        return list(self._maddrs)

    async def open_stream(self, peer_id: str, maddrs: list[str]) -> DaemonSocket:
        """Open a stream.

        Args:
            peer_id: whom to reach.
            maddrs: where it may be, for a peer that we are not connected with; those that make no sense are ignored.

        Raises:
            PeerLostError: it cannot be reached, does not speak our protocol, or took more than 10 s.
        """
        try:
            peer_id_bytes(peer_id)
        except ValueError:
            raise PeerLostError(f"{peer_id!r} is no peer id") from None
        with trio.move_on_after(OPEN_TIMEOUT_S):
            await self._online.wait()
            if maddrs:
                await dial(self._control_path, peer_id, maddrs, OPEN_TIMEOUT_S)
            stream = await open_stream(self._control_path, peer_id, PROTOCOL_NAME, OPEN_TIMEOUT_S)
            self._own(stream)
            return stream
        raise PeerLostError(f"timeout: {peer_id} was not reached within {OPEN_TIMEOUT_S:g} s")

    async def accept(self) -> DaemonSocket:
        """Wait for the next stream that another peer opened."""
        return await self._incoming.receive()

    @contextlib.asynccontextmanager
    async def through(self, daemon: Daemon) -> AsyncIterator[None]:
        """Work through a running daemon until the block is left; all streams are closed then.

        Raises:
            PeerLostError: the daemon does not answer.
        """
        protocols = [PROTOCOL_NAME] if self._relay is None else [PROTOCOL_NAME, circuit.HOP]
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self._streams_path}").to_bytes(), proto=protocols, balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        try:
            await ask(self._control_path, request, CONTROL_TIMEOUT_S)
            with trio.move_on_after(FIRST_PLACES_S):
                await self._renew_places()
            await self._refresh_maddrs()
            async with open_background() as background:
                background.start_soon(self._keep_places)
                if self._relay is not None:
                    background.start_soon(self._serve_relay, self._relay)
                background.start_soon(self._keep_maddrs, daemon)
                background.start_soon(self._watch, daemon)
                self._online.set()
                yield
        finally:
            self._go_offline()
            await self._close_streams()

    def _own(self, stream: DaemonSocket) -> None:
        self._streams.add(stream)
        stream.on_lost = self._streams.discard

    def _take(self, stream: DaemonSocket, message: bytes) -> None:
        """p2pd has connected to us and named the peer: hand the stream to whoever accepts, or to the relay."""
        info = p2pd_pb2.StreamInfo.FromString(message)
        stream.remote = PeerID(info.peer).to_base58()
        self._own(stream)
        if info.proto == circuit.HOP and self._relay is not None:
            self._relay.take(stream)
            return
        try:
            self._waiting.send_nowait(stream)
        except trio.WouldBlock:
            logger.warning("refused a stream of %s: %d are waiting to be accepted", stream.remote, ACCEPT_QUEUE)
            stream.fail("too many streams")

    def _go_offline(self) -> None:
        if self._online.is_set():
            self._online = trio.Event()

    def _break_streams(self, reason: str) -> None:
        for stream in list(self._streams):
            stream.fail(reason)

    async def _close_streams(self) -> None:
        """Close all streams, and wait until p2pd has taken what was sent last."""
        with trio.CancelScope(shield=True):
            for stream in list(self._streams):
                await stream.aclose()
            with trio.move_on_after(CLOSE_TIMEOUT_S):
                while self._streams:
                    await trio.sleep(0.005)
        self._break_streams("the network was closed")

    async def _refresh_maddrs(self) -> None:
        relayed = self._relays.maddrs if self._relays else []
        self._maddrs = await own_maddrs(self._control_path, self.peer_id, relayed)

    async def _keep_maddrs(self, daemon: Daemon) -> None:
        """Follow our addresses; a daemon that hangs is ended, and so replaced."""
        unanswered, barrier = 0, self._errors.containing("reading our addresses")
        while unanswered < MAX_UNANSWERED:
            await trio.sleep(REFRESH_MADDRS_S)
            with barrier:
                try:
                    await self._refresh_maddrs()
                    unanswered = 0
                except PeerLostError:
                    unanswered += 1
        logger.warning("the libp2p daemon (p2pd) does not answer any more: ending it")
        daemon.process.kill()

    async def _renew_places(self) -> None:
        if self._relays is not None:
            await self._relays.renew()

    async def _keep_places(self) -> None:
        barrier = self._errors.containing("renewing places at relays")
        while True:
            await trio.sleep(RENEW_EVERY_S)
            with barrier, contextlib.suppress(PeerLostError):
                await self._renew_places()
                await self._refresh_maddrs()

    async def _serve_relay(self, relay: Relay) -> None:
        relaying = self._errors.containing("relaying for other peers")
        while True:
            with relaying:
                await relay.serve()
            await trio.sleep(RELAY_AGAIN_S)

    async def _watch(self, daemon: Daemon) -> None:
        await daemon.exited.wait()
        self._go_offline()
        self._break_streams("the libp2p daemon has died")


async def own_maddrs(control_path: str, peer_id: str, relayed: Sequence[Multiaddr] = ()) -> list[str]:
    """The addresses of a daemon, as it knows them itself and through relays, loopback last. Raises PeerLostError."""
    response = await ask(control_path, p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), CONTROL_TIMEOUT_S)
    found = []
    for address in response.identify.addrs:
        with contextlib.suppress(Exception):  # a kind of address that hivemind's parser does not know
            found.append(Multiaddr(address))
    return dialable([*found, *relayed], peer_id)


@contextlib.asynccontextmanager
async def open_libp2p(
    peer_id: str, control_path: str, directory: Path, relays: Relays | None = None, relay: Relay | None = None
) -> AsyncIterator[LibP2P]:
    """The streams of a peer, which any daemon of its identity can carry, until the block is left.

    Args:
        peer_id: our identity.
        control_path: the control socket of each daemon.
        directory: where our own socket is made, which a daemon hands streams to.
        relays: through which others reach a peer that they cannot dial; None for one that they can.
        relay: what we do for such peers; None for nothing.
    """
    libp2p = LibP2P(peer_id, control_path, str(directory / "streams.sock"), relays, relay)
    loop = asyncio.get_running_loop()
    serving = loop.create_unix_server(lambda: DaemonSocket(libp2p._take), libp2p._streams_path)  # type: ignore
    server = await from_asyncio(serving)
    try:
        yield libp2p
    finally:
        server.close()
