"""The ways to a peer through each network interface of this machine: round trip, rate, and which one is used.

Opening a TCP connection takes one round trip. Linux (from 5.7 on) lets any program force its packets through an
interface. On other systems they only get the interface's address, and the system chooses the route.

To measure a rate, we upload bytes that the peer counts and drops; then it tells us how fast they came. A stranger may
ask for this, so it costs the peer little: it sends eight bytes, and takes one upload at a time, of at most 8 MiB in 2
s, and from all peers together 32 MiB at once and 32 MiB a minute on average. The other direction is not measured,
because then a stranger could make the peer send.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network.daemon import open_stream
from p2ptrain.network.socket_stream import Service, SocketStream
from p2ptrain.network.thread import open_background
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.transport import Refusal, Stream

logger = logging.getLogger(__name__)

# The first connection may wait for address resolution in the local network (ARP), so the shortest of three counts.
ATTEMPTS = 3
CONNECT_TIMEOUT_S = 3.0
# The libp2p protocol that measures rates.
RATE = "p2ptrain/rate/1"
# At 100 Mbit/s and 100 ms, TCP leaves its slow start after 2 MB and 0.8 s.
MOST_BYTES, MOST_S = 8 * 1024 * 1024, 2.0
# Enough for four interfaces of one machine; 4.5 Mbit/s on average if strangers ask all the time (guess).
MOST_BYTES_A_MINUTE = 4 * MOST_BYTES
# Allows for a slow path with a full buffer.
OPEN_TIMEOUT_S, ANSWER_TIMEOUT_S = 3.0, MOST_S + 3.0
_ANSWER = struct.Struct(">Q")
PIECE_BYTES = 64 * 1024
_ZEROS = bytes(PIECE_BYTES)
_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_FAMILIES_OF_NAMES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}

# As `getaddrinfo` returns it: host, port and, for IPv6, two more.
Target = tuple[Any, ...]

Arrival = tuple[float, int]
"""A time, in seconds on any clock, and how many bytes had arrived by then."""


@dataclass(frozen=True)
class Interface:
    """An address of this machine, the name of its network card, and the card's speed ("" and None if not known)."""

    address: str
    name: str = ""
    mbit: int | None = None


@dataclass(frozen=True)
class Way:
    """The way to a peer through one interface.

    Attributes:
        rtt_s: seconds of a round trip; None without an answer.
        used: whether the system uses it for this peer.
        target: the peer's address.
        mbit: the rate from us to the peer; None if it was not measured.
    """

    interface: Interface
    rtt_s: float | None
    used: bool
    target: Target = ()
    mbit: float | None = None


def interfaces_of(maddrs: Iterable[str]) -> list[Interface]:
    """The interfaces of this machine to other machines. `maddrs`: its addresses as libp2p found them."""
    hosts = dict.fromkeys([*_names_of_addresses(), *(host for _, host, _ in endpoints(maddrs))])
    return [_interface(host) for host in hosts if _can_send_from(host)]


async def ways_to(maddrs: Sequence[str], interfaces: Iterable[Interface]) -> list[Way]:
    """The ways to the first of a peer's addresses that answers, fastest first; none for a peer on this machine."""
    for family, host, port in endpoints(maddrs):
        target = await _resolved(family, host, port)
        used = await _round_trip(target, None) if target is not None else None
        if target is None or used is None:
            continue
        rtt_s, local = used
        if target[0] == local or ip_address(target[0]).is_loopback:
            return []
        ways = [Way(_interface(local), rtt_s, used=True, target=target)]
        async with trio.open_nursery() as nursery:
            for interface in interfaces:
                if interface.address != local and (":" in interface.address) == (":" in target[0]):
                    nursery.start_soon(_add_way, ways, target, interface)
        return sorted(ways, key=lambda way: (way.rtt_s is None, way.rtt_s, way.interface.address))
    return []


async def _add_way(ways: list[Way], target: Target, interface: Interface) -> None:
    answer = await _round_trip(target, interface)
    ways.append(Way(interface, answer[0] if answer else None, used=False, target=target))


def endpoints(maddrs: Iterable[str]) -> Iterator[tuple[int, str, int]]:
    """Address family, host and port of the addresses that TCP reaches without a relay."""
    for maddr in maddrs:
        _, kind, host, transport, port, *rest = [*maddr.split("/"), "", "", "", ""]
        family = {**_FAMILIES, **_FAMILIES_OF_NAMES}.get(kind)
        if family is not None and transport == "tcp" and port.isdecimal() and "p2p-circuit" not in rest:
            yield family, host, int(port)


async def _resolved(family: int, host: str, port: int) -> Target | None:
    try:
        return (await trio.socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))[0][4]
    except OSError:
        return None


async def _round_trip(target: Target, interface: Interface | None) -> tuple[float, str] | None:
    """Seconds of a round trip, and the local address; None without an answer. No interface: as the system routes."""
    answers = []
    with contextlib.suppress(OSError, trio.TooSlowError):
        for _ in range(ATTEMPTS):
            with trio.fail_after(CONNECT_TIMEOUT_S):
                answers.append(await _connect(target, interface))
    return min(answers, default=None)


async def _connect(target: Target, interface: Interface | None) -> tuple[float, str]:
    with await socket_to(target, interface) as connection:
        began_s = trio.current_time()
        await connection.connect(target)
        return trio.current_time() - began_s, str(connection.getsockname()[0])


async def socket_to(target: Target, interface: Interface | None) -> trio.socket.SocketType:
    """A socket whose packets leave through an interface (None: as the system routes)."""
    connection = trio.socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    try:
        if interface is not None:
            _force_through(connection, interface)
            await connection.bind((interface.address, 0))
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.asynccontextmanager
async def forwarded(way: Way) -> AsyncIterator[str]:
    """A loopback multiaddr. Until the block ends, one connection to it is forwarded along a way.

    This is for p2pd, which cannot choose its interface.
    """
    with trio.socket.socket() as listening:
        await listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        async with open_background() as background:
            background.start_soon(_forward_one, listening, way)
            yield f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}"


async def _forward_one(listening: trio.socket.SocketType, way: Way) -> None:
    with contextlib.suppress(OSError):
        near, _ = await listening.accept()
        with near, await socket_to(way.target, way.interface) as far:
            await far.connect(way.target)
            here, there = trio.SocketStream(near), trio.SocketStream(far)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, here, there, nursery.cancel_scope)
                nursery.start_soon(_pump, there, here, nursery.cancel_scope)


async def _pump(source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await source.receive_some(PIECE_BYTES):
            await target.send_all(data)
    both.cancel()


def _force_through(connection: trio.socket.SocketType, interface: Interface) -> None:
    if sys.platform == "linux" and interface.name:
        with contextlib.suppress(PermissionError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.name.encode() + b"\0")


def _can_send_from(host: str) -> bool:
    """Whether a host is an address of this machine (not of its router) from which it can reach other machines."""
    with contextlib.suppress(ValueError, OSError):
        if not (ip_address(host).is_loopback or ip_address(host).is_link_local):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
                trial.bind((host, 0))
                return True
    return False


def _interface(address: str) -> Interface:
    name = _names_of_addresses().get(address, "")
    try:  # Wi-Fi and virtual cards have no speed
        mbit = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        mbit = 0
    return Interface(address, name, mbit if mbit > 0 else None)


def _names_of_addresses() -> dict[str, str]:
    """The addresses of this machine, with the names of their interfaces."""
    import ifaddr  # which starts programs, to find the C library

    names = {}
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            # Linux names a second address as in "eth0:1".
            names[str(ip.ip if ip.is_IPv4 else ip.ip[0])] = adapter.name.partition(":")[0]
    return names


def bytes_per_s(arrivals: Sequence[Arrival]) -> float | None:
    """The rate in the later half of the time, when TCP has left its slow start; None if no time has passed."""
    if not arrivals:
        return None
    ended_s, in_all = arrivals[-1]
    middle_s = (arrivals[0][0] + ended_s) / 2
    then_s, before = max(arrival for arrival in arrivals if arrival[0] <= middle_s)
    return (in_all - before) / (ended_s - then_s) if ended_s > then_s else None


async def upload_rate(control_path: str, peer_id: str) -> float | None:
    """Bytes per second from us to a connected peer; None if the peer cannot measure it now."""
    try:
        stream = await open_stream(control_path, peer_id, RATE, OPEN_TIMEOUT_S)
        try:
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                return await _upload(stream)
        finally:
            stream.fail("measured")
    except PeerLostError as error:
        logger.debug("%s does not measure our rate: %s", peer_id, error)
    return None


async def _upload(stream: Stream) -> float | None:
    """Send until an answer comes. Raises PeerLostError."""
    answer = b""
    async with open_background() as background:
        background.start_soon(_send_zeros, stream)
        while len(answer) < _ANSWER.size and (data := await stream.receive_some()):
            answer += data
    return float(_ANSWER.unpack(answer)[0]) if len(answer) == _ANSWER.size else None


async def _send_zeros(stream: Stream) -> None:
    try:
        for _ in range(MOST_BYTES // len(_ZEROS)):
            await stream.send_all(_ZEROS)
    except PeerLostError as error:
        logger.debug("the peer takes no more bytes: %s", error)


class RateCounter:
    """Tells peers how fast they can send to us, one at a time."""

    def __init__(self, refusal: Refusal) -> None:
        self.service = Service("measuring a rate", 1)
        self._refusal = refusal
        self._allowance = TokenBucket(MOST_BYTES_A_MINUTE / 60, MOST_BYTES_A_MINUTE, now=0.0)

    def take(self, stream: SocketStream) -> None:
        """Take an upload. Called in the event loop."""
        self.service.take(stream, self._count)

    async def _count(self, stream: SocketStream) -> None:
        if self._refusal(stream.remote) is not None or not self._allowance.spend(MOST_BYTES, trio.current_time()):
            return
        arrivals: list[Arrival] = []
        count = 0
        try:
            with trio.move_on_after(MOST_S):
                while count < MOST_BYTES and (data := await stream.receive_some()):
                    count += len(data)
                    arrivals.append((trio.current_time(), count))
        finally:
            self._allowance.give_back(max(0, MOST_BYTES - count))
        if (rate := bytes_per_s(arrivals)) is not None:
            with trio.move_on_after(MOST_S):
                await stream.send_all(_ANSWER.pack(int(rate)))
