"""The ways to a peer: a round trip through each of this machine's network interfaces, and the one that is used.

A TCP connection takes one round trip to open. Linux (from 5.7 on) lets everybody force its packets through an
interface; elsewhere they only get the interface's address, and the system may route them as it likes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import trio

# The first connection may wait for name resolution in the local network (ARP); the shortest of three is the path's.
ATTEMPTS = 3
CONNECT_TIMEOUT_S = 3.0
_SIOCGIFADDR = 0x8915
_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_FAMILIES_OF_NAMES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}

# As `getaddrinfo` returns it: host, port and, for IPv6, two more.
Target = tuple[Any, ...]


@dataclass(frozen=True)
class Interface:
    """One address of this machine; its name, and what card and cable have agreed on, if the system tells ("", None)."""

    address: str
    name: str = ""
    mbit: int | None = None


@dataclass(frozen=True)
class Way:
    """The way to a peer through one interface.

    Attributes:
        rtt_s: seconds of a round trip; None without an answer.
        used: whether the system chooses it.
        target: the peer's address.
        mbit: the rate from us to the peer; None if it was not measured.
    """

    interface: Interface
    rtt_s: float | None
    used: bool
    target: Target = ()
    mbit: float | None = None


def interfaces_of(maddrs: Iterable[str]) -> list[Interface]:
    """Interfaces of this machine to other machines.

    `maddrs` are the addresses that libp2p found, for systems that do not list theirs: without those that the default
    route does not use.
    """
    hosts = {**dict(_named_addresses()), **dict.fromkeys(host for _, host, _ in endpoints(maddrs))}
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
    """Seconds of a round trip and the local address; None without an answer. Without an interface, as routed."""
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
    """A socket whose packets leave through an interface; without one, as routed."""
    connection = trio.socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    try:
        if interface is not None:
            _force_through(connection, interface)
            await connection.bind((interface.address, 0))
    except BaseException:
        connection.close()
        raise
    return connection


def _force_through(connection: trio.socket.SocketType, interface: Interface) -> None:
    if sys.platform == "linux" and interface.name:
        with contextlib.suppress(PermissionError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.name.encode() + b"\0")


def _can_send_from(host: str) -> bool:
    """Whether it is an address of this machine towards others, and not of its router."""
    with contextlib.suppress(ValueError, OSError):
        if not (ip_address(host).is_loopback or ip_address(host).is_link_local):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
                trial.bind((host, 0))
                return True
    return False


def _interface(address: str) -> Interface:
    name = dict(_named_addresses()).get(address, "")
    speed = _read(f"/sys/class/net/{name}/speed") if name else ""
    return Interface(address, name, int(speed) if speed.isdecimal() and int(speed) else None)


def _named_addresses() -> Iterator[tuple[str, str]]:
    """Addresses of this machine with the names of their interfaces, where the system tells them."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24]), name
    for line in _read("/proc/net/if_inet6").splitlines():
        digits, *_, name = line.split()
        yield str(ip_address(bytes.fromhex(digits))), name


def _read(path: str) -> str:
    """The text of a file of the system; "" where there is none. Wi-Fi and virtual cards have no speed."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
