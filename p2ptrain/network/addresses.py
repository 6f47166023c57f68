"""Multiaddrs: checks of those that users give, conversions for p2pd and other peers, and the ports used last."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.network._hivemind import Multiaddr, PeerID
from p2ptrain.protocol.membership.reachability import is_public, rank_for_anyone
from p2ptrain.settings.files import read_text, write_whole
from p2ptrain.settings.machine import address_towards
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.run_key import without_secrets
from p2ptrain.settings.setting import shortened

logger = logging.getLogger(__name__)

# A machine with many interfaces reports about ten; each costs up to a 5 s dial.
MAX_HINTS = 16
# A peer id has 34 to 42 bytes. Encoding one in base 58 takes quadratic time: seconds for 64 KiB.
MAX_PEER_ID_BYTES = 64
# Precedes a peer id inside a binary multiaddr.
P2P_CODE = b"\xa5\x03"
HOST_EXAMPLE = "/ip4/0.0.0.0/tcp/4001"
EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/Qm..."

# A UDP socket that is connected to one of these sends nothing, and has the address of the outgoing interface.
_PUBLIC_HOSTS = {"0.0.0.0": "8.8.8.8", "::": "2001:4860:4860::8888"}
# Of the addresses that p2pd reports, only loopback's is sure to have the port that it listens on, and not a router's.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_LISTEN_REMEDIES = {
    errno.EADDRINUSE: "another program uses that port: choose another port, or 0 for any free one",
    errno.EADDRNOTAVAIL: "this machine does not have that address; /ip4/0.0.0.0/tcp/0 listens on all of its addresses",
    errno.EACCES: "ports below 1024 need special rights: choose a higher one",
}


def check_initial_peers(maddrs: Iterable[str]) -> None:
    """Raises ConfigError unless each is a multiaddr that ends in /p2p/<peer id>."""
    for text in maddrs:
        if not text.isprintable() or " " in text:  # the parser takes "4001\n" for a port
            raise ConfigError(
                f"initial peer {shortened(text)} contains blanks or unprintable characters; expected {EXAMPLE}"
            )
        maddr = _parse("initial peer", text, EXAMPLE)
        if maddr.protocols()[-1].name != "p2p" or len(list(maddr.protocols())) < 2:
            raise ConfigError(
                f"initial peer {shortened(text)} must be an address that ends in /p2p/<peer id>, such as {EXAMPLE}; "
                "copy the whole address that the other peer printed"
            )


@functools.lru_cache(maxsize=4096)
def is_initial_peer(maddr: str) -> bool:
    """Whether a text is a valid initial peer."""
    try:
        check_initial_peers([maddr])
    except ConfigError:
        return False
    return True


def check_host_maddrs(maddrs: Iterable[str]) -> None:
    """Raises ConfigError unless each is a multiaddr that this machine can listen on now.

    p2pd reports failures only if all addresses fail. Two p2pds of one user can also share a port without an error;
    each then gets half of the other's connections.
    """
    for text in maddrs:
        maddr = _parse("--host-maddrs", text, HOST_EXAMPLE)
        names = [protocol.name for protocol in maddr.protocols()]
        has_transport = names[1:2] == ["tcp"] or names[1:3] == ["udp", "quic-v1"]  # those that p2pd has
        if names[0] not in ("ip4", "ip6") or not has_transport or names[-1] == "p2p":
            raise ConfigError(
                f"--host-maddrs {text!r} must be an IP address and a port of /tcp to listen on, such as {HOST_EXAMPLE}"
            )
        try:
            _try_to_listen(maddr)
        except OSError as error:
            remedy = _LISTEN_REMEDIES.get(error.errno or 0, f"choose another, such as {HOST_EXAMPLE}")
            raise ConfigError(f"--host-maddrs {text!r}: {error.strerror}; {remedy}") from None


def check_announce_maddrs(maddrs: Iterable[str]) -> None:
    """Raises ConfigError unless each is a multiaddr with a port and without a peer id."""
    for text in maddrs:
        maddr = _parse("--announce-maddrs", text, "/dns4/example.org/tcp/4001")
        if maddr.protocols()[-1].name == "p2p" or port_of(maddr) in (None, 0):
            raise ConfigError(
                f"--announce-maddrs {text!r} must have a port and must not contain /p2p/, "
                "such as /dns4/example.org/tcp/4001"
            )


def has_public_address(host_maddrs: Iterable[str], announce_maddrs: Iterable[str]) -> bool:
    """Whether a peer listens on or announces a public address."""
    return is_public(announce_maddrs) or is_public(map(_as_seen_outside, host_maddrs))


def port_of(maddr: Multiaddr) -> int | None:
    """The TCP or UDP port of a multiaddr, None when it has none."""
    for protocol in maddr.protocols():
        if protocol.name in ("tcp", "udp"):
            return int(maddr.value_for_protocol(protocol.code))
    return None


def dialable(maddrs: Iterable[Multiaddr], peer_id: str) -> list[str]:
    """The addresses with our peer id appended, without duplicates: public, relayed, local, and loopback last.

    Other peers get only the first of them.
    """
    return sorted(dict.fromkeys(f"{maddr}/p2p/{peer_id}" for maddr in maddrs), key=rank_for_anyone)


def with_ports_of(host_maddrs: Iterable[str], found: Iterable[str]) -> tuple[str, ...]:
    """Replace port 0 in `host_maddrs` by the port in use, as far as the addresses in `found` show it.

    /ip4/0.0.0.0/tcp/0, found as /ip4/127.0.0.1/tcp/40123/p2p/Qm…, becomes /ip4/0.0.0.0/tcp/40123.
    """
    parts_of_found = [maddr.split("/") for maddr in found]

    def fixed(host_maddr: str) -> str:
        _, family, host, transport, port, *rest = host_maddr.split("/")
        seen_at = _LOOPBACK_OF.get(host, host)
        for _, *used in parts_of_found:
            fits = len(used) > 3 and used[:3] == [family, seen_at, transport] and used[4 : 4 + len(rest)] == rest
            if port == "0" and fits:
                return "/".join(["", family, host, transport, used[3], *rest])
        return host_maddr

    return tuple(map(fixed, host_maddrs))


def on_last_ports(host_maddrs: tuple[str, ...], identity: Path) -> tuple[str, ...]:
    """Return the addresses to listen on, with port 0 replaced by the port used last if this machine can listen there.

    Other peers remember this one under that port. If all peers of a run came back on new ports, they would not find
    each other. `identity`: the identity file of the peer; the ports are kept in a file beside it.
    """
    try:
        found = read_text(_ports_file(identity)).splitlines()
    except (OSError, UnicodeDecodeError):
        return host_maddrs

    def available(host_maddr: str) -> str:
        (last,) = with_ports_of([host_maddr], found)
        try:
            check_host_maddrs([last])
        except ConfigError:
            return host_maddr
        return last

    return tuple(map(available, host_maddrs))


def keep_ports(maddrs: Iterable[str], identity: Path) -> None:
    """Write the addresses that a peer listens on to a file, for `on_last_ports`. Errors are ignored."""
    try:
        write_whole(_ports_file(identity), "".join(f"{maddr}\n" for maddr in maddrs).encode())
    except OSError as error:
        logger.debug("the ports of %s cannot be kept: %s", identity, error)


def hints(maddrs: Iterable[str], peer_id: str) -> list[bytes]:
    """The well-formed ones of at most 16 untrusted addresses of a peer, in p2pd's binary form."""
    encoded = []
    for text in itertools.islice(maddrs, MAX_HINTS):
        with contextlib.suppress(Exception):  # the parser raises many types
            encoded.append(_to_bytes(text.removesuffix(f"/p2p/{peer_id}")))
    return encoded


def ways_in(config: NetworkConfig) -> tuple[str, ...]:
    """All addresses to join through: those that the user gave, and remembered ones. Each once."""
    return tuple(dict.fromkeys((*config.initial_peers, *config.remembered_peers)))


def by_peer_id(maddrs: Iterable[str]) -> dict[str, list[str]]:
    """Group checked addresses by the peer id that they end in."""
    grouped: dict[str, list[str]] = {}
    for maddr in maddrs:
        grouped.setdefault(maddr.rpartition("/p2p/")[2], []).append(maddr)
    return grouped


def peer_id_bytes(peer_id: str) -> bytes:
    """A base58 peer id in p2pd's binary form. Raises ValueError."""
    return bytes(PeerID.from_base58(peer_id).to_bytes())


def peer_id_text(raw: bytes) -> str:
    """The base58 form of a peer id that another peer sent. Raises ValueError if it is too long."""
    if len(raw) > MAX_PEER_ID_BYTES:
        raise ValueError(f"a peer id of {len(raw)} bytes")
    return str(PeerID(raw).to_base58())


def _ports_file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.ports")


def _to_bytes(maddr: str) -> bytes:
    """A multiaddr in p2pd's binary form. hivemind would encode a relay's peer id as a CID, which p2pd rejects."""
    way, *relayed = maddr.split("/p2p/")
    encoded = bytes(Multiaddr(way).to_bytes())
    for text in relayed:
        relay, slash, rest = text.partition("/")
        identity = peer_id_bytes(relay)
        encoded += P2P_CODE + bytes([len(identity)]) + identity + Multiaddr(slash + rest).to_bytes()
    return encoded


def _parse(what: str, text: str, example: str) -> Multiaddr:
    try:
        maddr = Multiaddr(text)
        maddr.protocols()[0]  # "/" is a multiaddr without any
        return maddr
    except Exception as error:  # the parser raises many types
        reason = without_secrets(str(error).partition("\n")[0]) or type(error).__name__
        if "protocol p2p:" in reason:
            reason = "the id after /p2p/ is not complete: copy the whole address"
        raise ConfigError(f"{what} {shortened(text)} is not a multiaddr ({reason}); expected {example}") from None


def _as_seen_outside(host_maddr: str) -> str:
    """A wildcard address replaced by that of the interface towards the internet; other addresses unchanged."""
    _, family, host, *rest = host_maddr.split("/")
    if host not in _PUBLIC_HOSTS:
        return host_maddr
    host = address_towards(_PUBLIC_HOSTS[host]) or _LOOPBACK_OF[host]
    return "/".join(["", family, host, *rest])


def _try_to_listen(maddr: Multiaddr) -> None:
    """Raises OSError when the address or its port is not available."""
    family, transport, *_ = (protocol.name for protocol in maddr.protocols())
    address = maddr.value_for_protocol(next(iter(maddr.protocols())).code)
    with socket.socket(
        socket.AF_INET6 if family == "ip6" else socket.AF_INET,
        socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM,
    ) as trial:
        if transport == "tcp":
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as p2pd does
        trial.bind((address, port_of(maddr) or 0))
