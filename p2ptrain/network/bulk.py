"""Bulk connections over TLS: implements `protocol.wire.transport.BulkTransport`.

A certificate is self-signed and lasts as long as the process. Peers learn each other's in the Hellos of their link,
which libp2p has authenticated. Each side accepts only the certificate of the other. A client names its own certificate
in the server name of the handshake, so that the server knows which one to ask for, and refuses strangers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError, PeerLostError, WireError
from p2ptrain.network.process_lifetime import close_everywhere
from p2ptrain.network.socket_stream import SocketStream
from p2ptrain.network.thread import from_asyncio, open_background
from p2ptrain.protocol.membership.reachability import best_first, is_relayed
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# A handshake takes two round trips. A stranger is refused in the first; a silent one is closed after this (guess).
HANDSHAKE_S = 3.0
# Handshakes at once, in all and from one address; more are closed. Also connections that wait to be accepted.
MAX_HANDSHAKES, MAX_HANDSHAKES_PER_ADDRESS = 64, 32
# Connections at once, with handshakes and those that are being closed; and how many are accepted in a second.
MAX_OPEN, ACCEPTS_PER_S = 192, 50.0
# A ClientHello with one server name has 300 bytes, and 1,500 with a post-quantum key. It mostly comes in one piece.
MAX_CLIENT_HELLO_BYTES, PEEK_AGAIN_S = 8192, 0.02
TLS_HANDSHAKE = 22
# How many addresses of a peer are dialled, and how long after one the next (Happy Eyeballs, RFC 8305).
MAX_DIALLED, DIAL_APART_S = 6, 0.25
# How many ports are tried to find one that is free on all hosts.
PORT_TRIES = 8
# What a host follows in a multiaddr.
FAMILIES = ("ip4", "ip6", "dns", "dns4", "dns6")
# BBR keeps queues short, so that heartbeats pass (Cardwell et al., 2016). Linux may not have it, or not allow it.
TCP_CONGESTION, BBR = 13, b"bbr"
# How many unsent bytes the kernel takes: few, so that the sender sends at the rate of the path.
UNSENT_BYTES = 128 * 1024
# How long bytes may stay unacknowledged before the connection breaks: as long as a silent link is kept at most.
USER_TIMEOUT_MS = 30_000
# A certificate is always valid, because clocks of peers may differ.
NOT_BEFORE, NOT_AFTER = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)
PORT = struct.Struct("!H")
# The form of a result of `_name_of`.
SERVER_NAME = re.compile(rb"p[0-9a-f]{40}")


@dataclass(frozen=True)
class _Admitted:
    """A peer whose connections are accepted, its certificate, and TLS settings that accept only this certificate."""

    peer_id: PeerId
    certificate: bytes
    for_accepting: ssl.SSLContext
    for_dialling: ssl.SSLContext


class TlsBulk:
    """Opens and accepts bulk connections of this peer.

    Attributes:
        offer: our port and certificate, for the other peers; empty while we do not listen.
    """

    def __init__(self, peer_id: PeerId, host_maddrs: Iterable[str], port: int, scratch: Path) -> None:
        """
        Args:
            peer_id: ours.
            host_maddrs: where libp2p listens; connections are accepted on the same hosts.
            port: to listen on; 0 for any free one.
            scratch: our private directory, for the key.
        """
        self.offer = b""
        self._hosts = list(dict.fromkeys(host for maddr in host_maddrs if (host := _host_of(maddr))))
        self._port = port
        self._own_certificate, pem = make_certificate(peer_id)
        self._server_name = _name_of(self._own_certificate)
        self._key_file = scratch / "bulk.pem"
        self._key_file.touch(0o600)
        self._key_file.write_bytes(pem)
        self._errors = ErrorLog(logger)
        self._streams: set[SocketStream] = set()
        self._admitted: dict[str, _Admitted] = {}
        self._names: dict[PeerId, str] = {}
        self._handshakes: Counter[str] = Counter()
        self._accepts = TokenBucket(ACCEPTS_PER_S, MAX_HANDSHAKES, 0.0)
        self._accepted, self._incoming = trio.open_memory_channel[SocketStream](MAX_HANDSHAKES)
        self._server_context = self._context(ssl.PROTOCOL_TLS_SERVER)
        self._server_context.sni_callback = self._choose

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Accept connections until the block ends. Raises ConfigError if the port cannot be used."""
        listeners = _listen_on_all(self._hosts, self._port)
        try:
            if listeners:
                self.offer = PORT.pack(listeners[0].getsockname()[1]) + self._own_certificate
            async with open_background() as background:
                for listener in listeners:
                    background.start_soon(self._take_forever, listener, background)
                yield
        finally:
            self.offer = b""
            for listener in listeners:
                close_everywhere(listener)
            for stream in list(self._streams):
                stream.fail("the network was closed")

    def admit(self, peer_id: PeerId, offer: bytes) -> None:
        """Accept connections of a peer with the certificate of this offer, and no longer with an earlier one.

        An empty offer only ends that of the earlier one. Raises WireError if the offer is malformed or another peer's.
        """
        self._admitted.pop(self._names.pop(peer_id, ""), None)
        if not offer:
            return
        _, certificate = _parse(offer)
        _check_owner(certificate, peer_id)
        try:
            contexts = [self._context(side, offer) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
        except OSError as error:  # the key file cannot be read: libp2p carries the bytes
            self._errors.note("preparing bulk connections", error)
            return
        name = self._names[peer_id] = _name_of(certificate)
        self._admitted[name] = _Admitted(peer_id, certificate, *contexts)

    async def open(self, peer_id: PeerId, offer: bytes, maddrs: Sequence[str]) -> SocketStream:
        """Open a connection to a peer at one of its addresses. Raises PeerLostError."""
        port, certificate = _parse(offer)
        admitted = self._admitted.get(_name_of(certificate))
        if admitted is None:
            raise PeerLostError(f"{peer_id}: its certificate is not known")
        direct = [maddr for maddr in maddrs if not is_relayed(maddr)]
        hosts = list(dict.fromkeys(host for maddr in best_first(direct) if (host := _host_of(maddr))))[:MAX_DIALLED]
        found: list[SocketStream] = []
        why = "it has no address"

        async def dial(number: int, host: str) -> None:
            nonlocal why
            await trio.sleep(number * DIAL_APART_S)
            try:
                found.append(await self._dial(peer_id, host, port, admitted.for_dialling))
                nursery.cancel_scope.cancel()
            except (OSError, ValueError) as error:  # UnicodeError is a ValueError
                why = f"{host}: {error}"

        try:
            async with trio.open_nursery() as nursery:
                for number, host in enumerate(hosts):
                    nursery.start_soon(dial, number, host)
            if not found:
                raise PeerLostError(f"{peer_id}: {why}")
            return found.pop(0)
        finally:
            for stream in found:
                stream.fail("it is not needed")

    async def accept(self) -> SocketStream:
        """Wait for the next connection of an admitted peer."""
        return await self._incoming.receive()

    async def _dial(self, peer_id: PeerId, host: str, port: int, context: ssl.SSLContext) -> SocketStream:
        connecting = asyncio.get_running_loop().create_connection(  # type: ignore[type-var]
            lambda: SocketStream(among=self._streams, remote=peer_id, has_first_message=False),
            host,
            port,
            ssl=context,
            server_hostname=self._server_name,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
        transport, stream = await from_asyncio(connecting)
        _tune(transport, stream)
        return stream

    async def _take_forever(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await from_asyncio(loop.sock_accept(listener))
            except OSError as error:  # too many open files: libp2p carries the bytes
                self._errors.note("accepting a bulk connection", error)
                await trio.sleep(1.0)
                continue
            under_way = self._handshakes.total()
            is_full = len(self._streams) + under_way >= MAX_OPEN or under_way >= MAX_HANDSHAKES
            is_full = is_full or self._handshakes[address] >= MAX_HANDSHAKES_PER_ADDRESS
            if is_full or not self._accepts.spend(1.0, trio.current_time()):
                connection.close()
            else:
                self._handshakes[address] += 1
                nursery.start_soon(self._greet, connection, address)

    async def _greet(self, connection: socket.socket, address: str) -> None:
        """The server's side of a handshake."""
        stream = SocketStream(among=self._streams, has_first_message=False)
        try:
            with self._errors.containing("accepting a bulk connection"), contextlib.suppress(OSError):
                if not await self._is_named(connection):
                    return
                connecting = asyncio.get_running_loop().connect_accepted_socket(  # type: ignore[type-var]
                    lambda: stream, connection, ssl=self._server_context, ssl_handshake_timeout=HANDSHAKE_S
                )
                transport, _ = await from_asyncio(connecting)
                _tune(transport, stream)
                if stream.has_ended:
                    return
                certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
                admitted = self._admitted.get(_name_of(certificate))
                if admitted is None or admitted.certificate != certificate:
                    stream.fail("its link has ended")
                    return
                stream.remote = admitted.peer_id
                try:
                    self._accepted.send_nowait(stream)
                except trio.WouldBlock:
                    stream.fail("too many connections wait to be accepted")
        finally:
            if stream not in self._streams:
                connection.close()  # also if this task was cancelled before it began
            self._handshakes[address] -= 1
            if not self._handshakes[address]:
                del self._handshakes[address]

    async def _is_named(self, connection: socket.socket) -> bool:
        """Whether the first bytes, which are only peeked at, hold the server name of an admitted peer.

        So strangers cost no TLS. And Python would write a traceback to the terminal for a name that it cannot decode.
        """
        with trio.move_on_after(HANDSHAKE_S):
            while True:
                await trio.lowlevel.wait_readable(connection)
                hello = connection.recv(MAX_CLIENT_HELLO_BYTES, socket.MSG_PEEK)
                if not hello or hello[0] != TLS_HANDSHAKE or len(hello) == MAX_CLIENT_HELLO_BYTES:
                    return False
                if len(hello) >= 5 and len(hello) >= 5 + int.from_bytes(hello[3:5], "big"):
                    return any(name in self._admitted for name in map(bytes.decode, SERVER_NAME.findall(hello)))
                await trio.sleep(PEEK_AGAIN_S)
        return False

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        """Ask for the certificate that a client names."""
        admitted = self._admitted.get(name or "")
        if admitted is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = admitted.for_accepting
        return None

    def _context(self, side: int, offer: bytes = b"") -> ssl.SSLContext:
        """TLS settings with our certificate, which accept only the certificate of an offer. Raises WireError."""
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_cert_chain(self._key_file)
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        if offer:
            try:
                context.load_verify_locations(cadata=_parse(offer)[1])
            except ssl.SSLError as error:
                raise WireError(f"an offer of bulk connections without a certificate: {error}") from None
        return context


def _listen_on_all(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets that listen on all hosts, on one port (0: any that is free). Raises ConfigError."""
    listeners: list[socket.socket] = []
    for tries_left in reversed(range(PORT_TRIES if port == 0 else 1)):
        try:
            for host in hosts:
                listeners.append(_listen(host, listeners[0].getsockname()[1] if listeners else port))
            break
        except OSError as error:
            for listener in listeners:
                listener.close()
            listeners.clear()
            if not tries_left:
                raise ConfigError(
                    f"--bulk-port {port}: {error.strerror}; choose another port, 0 for any free one, or --bulk off"
                ) from None
    return listeners


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(MAX_HANDSHAKES)
    except OSError:
        listener.close()
        raise
    return listener


def _tune(transport: asyncio.BaseTransport, stream: SocketStream) -> None:
    """Set those options of a connection's socket that this system has."""
    if stream.has_ended:  # just after its handshake
        return
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):  # Linux has them
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, BBR)


def make_certificate(peer_id: PeerId) -> tuple[bytes, bytes]:
    """A new self-signed certificate as DER, and with its key as PEM. It names its peer: no other peer can offer it."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, peer_id)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOT_BEFORE, NOT_AFTER)
    certificate = builder.sign(key, None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.DER), pem + certificate.public_bytes(Encoding.PEM)


def _parse(offer: bytes) -> tuple[int, bytes]:
    """Port and certificate of an offer. Raises WireError."""
    port = int.from_bytes(offer[: PORT.size], "big")
    if len(offer) <= PORT.size or not port:
        raise WireError("a malformed offer of bulk connections")
    return port, offer[PORT.size :]


def _check_owner(certificate: bytes, peer_id: PeerId) -> None:
    """Raises WireError unless the certificate's common name is this peer's id."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        owners = [name.value for name in parsed.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        is_ed25519 = isinstance(parsed.public_key(), Ed25519PublicKey)
    except Exception as error:  # untrusted bytes; cryptography raises several types
        raise WireError(f"an offer of bulk connections without a certificate: {error}") from None
    if not is_ed25519:
        raise WireError("an offer of bulk connections with a key that is not Ed25519")
    if owners != [peer_id]:
        raise WireError("an offer of bulk connections with the certificate of another peer")


def _name_of(certificate: bytes) -> str:
    """The server name by which a client names its certificate."""
    return f"p{hashlib.sha256(certificate).hexdigest()[:40]}"


def _host_of(maddr: str) -> str:
    """The host of a multiaddr; empty if it has none that TCP can reach."""
    _, family, host, *_ = [*maddr.split("/"), "", ""]
    return host if family in FAMILIES else ""
