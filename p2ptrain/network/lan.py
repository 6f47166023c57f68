"""Runs on the local network: peers announce theirs, and `p2ptrain join` and `find` look for them.

Multicast DNS and DNS service discovery (RFC 6762, 6763) carry a record of each peer. Every machine on the network can
send any record, so `parse` checks each one, and few of a flood are kept. A record can name only addresses of the local
network. A peer that joins by a record joins only a run of the founder that the record names.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import trio

from p2ptrain.network.thread import NetworkThread, from_asyncio
from p2ptrain.protocol.wire.text import escaped, shown
from p2ptrain.settings.config import RUN_ID
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.peer_id import is_peer_id
from p2ptrain.settings.ticket import MAX_ADDRESSES as MAX_IN_TICKET
from p2ptrain.settings.ticket import Ticket

if TYPE_CHECKING:
    import ifaddr
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_p2ptrain._tcp.local."
# Answers take about 0.3 s on Ethernet; Wi-Fi loses multicast packets, and the question is repeated after a second.
LOOK_S = 2.0
# That time is slept in as many turns: a process that gets no core for it still reads its sockets between two turns.
TURNS = 20
# Records that are kept, one for each peer; each costs a question. More peers are not expected (guess).
MAX_RECORDS = 256
# How often a record gets the present step (guess).
UPDATE_EVERY_S = 30.0
# A goodbye is sent three times within 0.3 s.
GOODBYE_S = 1.0
MAX_ADDRESSES = 4
MAX_MODEL_CHARS = 60
# A text of a record has at most 255 bytes, with its name.
MAX_VALUE_BYTES = 240
# More than any run has, and short enough for a line.
MAX_PARAMETERS, MAX_PEERS, MAX_STEP = 10**14, 10**6, 10**12
NETWORKS = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10"))
)
_ADDRESS = re.compile(r"/ip([46])/([0-9a-f:.]{2,39})/(?:tcp/(\d{1,5})|udp/(\d{1,5})/quic(?:-v1)?)", re.ASCII)
# Docker and Podman make these.
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A peer's description of its run. All fields are empty for a closed run.

    Attributes:
        model: name of the run's model, safe to print; "" if the peer does not know it: a bootstrap node.
        parameters, peers, step: of the run; 0 if the peer does not know them.
        founder: id of the run's founder; "" if the peer does not know it.
        peer_id: id of the peer that announces the run.
        addresses: its addresses on the local network, which end in its id.
    """

    run_id: str = ""
    model: str = ""
    parameters: int = 0
    peers: int = 0
    step: int = 0
    founder: str = ""
    peer_id: str = ""
    addresses: tuple[str, ...] = ()


CLOSED = Announcement()


@dataclass(frozen=True)
class LanRun:
    """A run on the local network, as its peers announce it; attributes as of `Announcement`."""

    run_id: str
    model: str
    parameters: int
    peers: int
    step: int
    founder: str
    addresses: tuple[str, ...]

    @property
    def ticket(self) -> Ticket:
        """A ticket for this run, and for no run of another founder."""
        return Ticket(self.run_id, self.addresses, self.founder)


def looks(config: NetworkConfig, *, in_container: bool) -> bool:
    """Whether a peer without initial peers looks for runs. With a run key it does not: no record names a closed run."""
    return _is_on(config, in_container) and config.key is None


def announces(config: NetworkConfig, *, in_container: bool) -> bool:
    """Whether a peer announces its run. That there is a closed run is announced only if the user asks for it."""
    return _is_on(config, in_container) and (not is_closed(config) or config.lan == "on")


def is_closed(config: NetworkConfig) -> bool:
    """Whether only some may join the run through this peer."""
    return config.key is not None or config.allow is not None


def _is_on(config: NetworkConfig, in_container: bool) -> bool:
    return config.lan in ("on", "join") or (config.lan == "auto" and not in_container)


def decide(found: int, *, lan: str, can_ask: bool) -> Literal["start", "join", "ask", "refuse"]:
    """Decide what `p2ptrain join` does with the runs that it found.

    Args:
        found: how many runs this peer could join.
        lan: the setting.
        can_ask: whether there is a terminal.
    """
    if not found:
        return "start"
    if found == 1 and lan == "join":
        return "join"
    return "ask" if can_ask and lan != "join" else "refuse"


def is_local(host: str) -> bool:
    """Whether an IP address is one of a local network: private or link-local."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return any(address.version == network.version and address in network for network in NETWORKS)


def local_hosts(host_maddrs: Iterable[str], own: Iterable[str]) -> list[str]:
    """This machine's IPv4 addresses in local networks on which a peer listens.

    Args:
        host_maddrs: where the peer listens; /ip4/0.0.0.0 is everywhere.
        own: all addresses of this machine.
    """
    listening = _listening(host_maddrs)
    return [host for host in own if ":" not in host and is_local(host) and {host, "0.0.0.0"} & listening]


def _listening(host_maddrs: Iterable[str]) -> set[str]:
    return {maddr.split("/")[2] for maddr in host_maddrs if maddr.startswith("/ip4/")}


def runs_of(announcements: Iterable[Announcement]) -> list[LanRun]:
    """The open runs that peers announce. Runs of one name with different founders are different runs.

    The runs of bootstrap nodes, which do not know the founder, are listed apart.
    """
    named: dict[tuple[str, str], dict[str, Announcement]] = {}
    for one in sorted(announcements, key=lambda one: one.peer_id):
        if one.run_id:
            named.setdefault((one.run_id, one.founder), {})[one.peer_id] = one
    runs = []
    for (run_id, founder), by_peer in sorted(named.items()):
        members = list(by_peer.values())
        one = max(members, key=lambda member: member.step)
        # One address of each peer first.
        turns = chain.from_iterable(zip_longest(*(member.addresses for member in members)))
        addresses = tuple(address for address in turns if address is not None)[:MAX_IN_TICKET]
        peers = max(member.peers for member in members)
        runs.append(LanRun(run_id, one.model, one.parameters, peers, one.step, founder, addresses))
    return runs


def matching(runs: Iterable[LanRun], run_id: str | None, founder: str = "") -> list[LanRun]:
    """The runs with this name (None: any) and this founder ("": any).

    The run of a bootstrap node, which does not know the founder, fits any: the founder is checked on joining.
    """
    return [run for run in runs if run_id in (None, run.run_id) and (not founder or run.founder in ("", founder))]


def record_of(announcement: Announcement) -> dict[str, str] | None:
    """The texts of a record; None if one of them is too long."""
    if not announcement.run_id:
        return {"v": "1", "key": "1"}
    hosts = [address.rpartition("/p2p/")[0] for address in announcement.addresses]
    record = {
        "v": "1",
        "key": "0",
        "run": announcement.run_id,
        "model": announcement.model,
        "params": str(announcement.parameters),
        "peers": str(announcement.peers),
        "step": str(announcement.step),
        "founder": announcement.founder,
        "id": announcement.peer_id,
        **{f"a{number}": host for number, host in enumerate(hosts)},
    }
    return record if all(len(value.encode()) <= MAX_VALUE_BYTES for value in record.values()) else None


def parse(record: Mapping[bytes, bytes | None]) -> Announcement | None:
    """Read a record of another machine; None if it breaks a rule."""
    try:
        return _parse({name: (value or b"").decode() for name, value in record.items() if name in _NAMES})
    except (KeyError, ValueError):
        return None


_NAMES = {name.encode() for name in ("v", "key", "run", "model", "params", "peers", "step", "founder", "id")} | {
    f"a{number}".encode() for number in range(MAX_ADDRESSES)
}


def _parse(texts: dict[bytes, str]) -> Announcement:
    """Raises KeyError or ValueError."""
    if texts[b"v"] != "1" or texts[b"key"] not in ("0", "1"):
        raise ValueError("version or key")
    if texts[b"key"] == "1":
        return CLOSED
    run_id, founder, peer_id = texts[b"run"], texts[b"founder"], texts[b"id"]
    if not RUN_ID.fits(run_id) or escaped(run_id) != run_id:
        raise ValueError("run id")
    if not is_peer_id(peer_id) or (founder and not is_peer_id(founder)):
        raise ValueError("peer id")
    addresses = [texts[name] for name in sorted(_NAMES) if name[:1] == b"a" and name in texts]
    if not addresses or not all(map(_is_local_maddr, addresses)):
        raise ValueError("addresses")
    return Announcement(
        run_id=run_id,
        model=shown(texts[b"model"], MAX_MODEL_CHARS),
        founder=founder,
        peer_id=peer_id,
        parameters=_number(texts[b"params"], MAX_PARAMETERS),
        peers=_number(texts[b"peers"], MAX_PEERS),
        step=_number(texts[b"step"], MAX_STEP),
        addresses=tuple(f"{address}/p2p/{peer_id}" for address in addresses),
    )


def _number(text: str, most: int) -> int:
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII) or int(text) > most:
        raise ValueError("number")
    return int(text)


def _is_local_maddr(maddr: str) -> bool:
    """Whether it is an address of a local network, without a peer id."""
    if (found := _ADDRESS.fullmatch(maddr)) is None:
        return False
    family, host, *ports = found.groups()
    port = int(ports[0] or ports[1])
    return (":" in host) == (family == "6") and is_local(host) and 0 < port < 65536


def nearby(announcement: Announcement, networks: Sequence[IPv4Network | IPv6Network]) -> Announcement | None:
    """The announcement with only the addresses on these networks; None if none of them is.

    This machine may be connected to other private networks, and a stranger must not make a peer dial there.
    """
    hosts = ((ip_address(address.split("/")[2]), address) for address in announcement.addresses)
    kept = tuple(address for host, address in hosts if any(host in network for network in networks))
    return dataclasses.replace(announcement, addresses=kept) if kept or announcement == CLOSED else None


def local_maddrs(maddrs: Iterable[str]) -> tuple[str, ...]:
    """The addresses of a peer that a record can name."""
    fitting = [maddr for maddr in maddrs if _is_local_maddr(maddr.rpartition("/p2p/")[0])]
    return tuple(fitting[:MAX_ADDRESSES])


def in_container() -> bool:
    """Whether this process seems to run in a container, whose network other machines do not see."""
    marks = ("container", "KUBERNETES_SERVICE_HOST")
    return any(mark in os.environ for mark in marks) or any(Path(name).exists() for name in _CONTAINER_FILES)


def hosts_of(host_maddrs: Iterable[str]) -> list[str]:
    """The addresses of this machine through which it announces and looks; none if it listens on loopback only."""
    if not any(host == "0.0.0.0" or is_local(host) for host in _listening(host_maddrs)):
        return []
    return local_hosts(host_maddrs, [str(ip.ip) for ip in _own()])


def _own() -> list[ifaddr.IP]:
    """The IPv4 addresses of this machine."""
    import ifaddr  # which starts programs, to find the C library

    return [ip for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]


def look(hosts: Sequence[str]) -> list[Announcement]:
    """Look for announcements through these addresses of this machine. Blocks for LOOK_S seconds.

    If multicast does not work here, logs why and returns nothing.
    """
    if not hosts:
        return []
    thread = NetworkThread()
    try:
        return thread.run(lambda: from_asyncio(_look(hosts)), timeout_s=LOOK_S + 10)
    finally:
        thread.stop(GOODBYE_S)


async def announce(describe: Callable[[], Announcement], host_maddrs: Sequence[str]) -> None:
    """Announce a run on this machine's local networks until cancelled, then say goodbye.

    After an error, which is logged once, or a change of this machine's addresses, it begins again.

    Args:
        describe: called at the beginning, and every UPDATE_EVERY_S.
        host_maddrs: where the peer listens.
    """
    level = logging.INFO
    while True:
        try:
            if hosts := hosts_of(host_maddrs):
                await from_asyncio(_announce(describe, host_maddrs, hosts))
        except Exception as error:
            logger.log(level, "the run is not announced on the local network: %r", error)
            level = logging.DEBUG
        await trio.sleep(UPDATE_EVERY_S)


async def _announce(describe: Callable[[], Announcement], host_maddrs: Sequence[str], hosts: Sequence[str]) -> None:
    """Announce through these addresses of this machine, until they change."""
    from zeroconf.asyncio import AsyncServiceInfo

    name, told = secrets.token_hex(8), None  # a random name: that of a closed run's peer is not told
    async with _multicast(hosts) as zeroconf:
        while hosts_of(host_maddrs) == hosts:
            record = record_of(describe())
            if record is not None and record != told:
                info = AsyncServiceInfo(  # the port is required and not used: the record has whole addresses
                    SERVICE,
                    f"{name}.{SERVICE}",
                    port=9,
                    properties=record,
                    server=f"{name}.local.",
                    parsed_addresses=list(hosts),
                )
                change = zeroconf.async_update_service if told else zeroconf.async_register_service
                await (await change(info))
                told = record
            await asyncio.sleep(UPDATE_EVERY_S)


@contextlib.asynccontextmanager
async def _multicast(hosts: Sequence[str]) -> AsyncIterator[AsyncZeroconf]:
    """Sockets for multicast DNS on these addresses of this machine. Raises OSError or RuntimeError."""
    from zeroconf import Error, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    zeroconf = AsyncZeroconf(interfaces=list(hosts), ip_version=IPVersion.V4Only)
    try:
        yield zeroconf
    finally:
        with contextlib.suppress(OSError, RuntimeError, Error, TimeoutError):
            await asyncio.wait_for(zeroconf.async_close(), GOODBYE_S)


async def _look(hosts: Sequence[str]) -> list[Announcement]:
    from zeroconf import Error, ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    found: dict[str, AsyncServiceInfo] = {}
    asking: set[asyncio.Task[bool]] = set()

    def note(*, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        # Goodbyes are ignored: any machine can send a false one, and a true one in these two seconds is rare.
        if state_change is ServiceStateChange.Added and name not in found and len(asking) < MAX_RECORDS:
            with contextlib.suppress(Error, ValueError):  # an invalid name
                found[name] = AsyncServiceInfo(SERVICE, name)
                asking.add(asyncio.ensure_future(found[name].async_request(zeroconf, LOOK_S * 1000)))

    async with contextlib.AsyncExitStack() as stack:
        try:
            zeroconf = await stack.enter_async_context(_multicast(hosts))
        except (OSError, RuntimeError) as error:
            logger.info("cannot look for runs on the local network: %s", error)
            return []
        try:
            browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[note])
            for _ in range(TURNS):
                await asyncio.sleep(LOOK_S / TURNS)
            await browser.async_cancel()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
    networks = [ip_network(f"{ip.ip}/{ip.network_prefix}", strict=False) for ip in _own() if ip.ip in hosts]
    parsed = (parse(info.properties) for info in found.values())
    return [near for one in parsed if one is not None and (near := nearby(one, networks)) is not None]
