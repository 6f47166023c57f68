"""Checks of addresses and reachability, as pure functions of the results of a network probe."""

from __future__ import annotations

import enum
import ipaddress
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import count, short_id
from p2ptrain.monitor.doctor.finding import Finding, Mark, failed, ok, warning
from p2ptrain.network.dht import MAX_CLOCK_SKEW_S
from p2ptrain.network.dial_back import DialBack
from p2ptrain.network.lan import is_local
from p2ptrain.network.probe import InitialPeer, Probe
from p2ptrain.network.ways import Interface, Way
from p2ptrain.protocol.membership.reachability import Scope, scope_of
from p2ptrain.protocol.membership.status import MemberInfo
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig

# Warn early: clocks without NTP drift by seconds per week.
UNEASY_SKEW_S = 1.0
# A warning says that another interface is better by this factor. Round trips of one path differ by milliseconds.
FAR_SLOWER, NOISE_S = 2, 0.005
# How many peers are named of those that lack the most direct connections.
MOST_NAMED = 3
# The port in advice to a user who has chosen none; as in docs/use/reachability.md.
EXAMPLE_PORT = "4001"
CLOCK_REMEDY = "sudo timedatectl set-ntp true"
_CARRIER_GRADE = ipaddress.ip_network("100.64.0.0/10")


class AddressKind(enum.Enum):
    """Kinds of addresses, with their names for users."""

    LOOPBACK = "this machine only"
    PRIVATE = "private network"
    CARRIER = "carrier-grade NAT"
    LINK = "link-local"
    RESERVED = "reserved range"
    PUBLIC = "public"
    NAME = "name"
    RELAYED = "through a relay"


def kind_of(maddr: str) -> AddressKind:
    """The kind of a multiaddr."""
    _, family, host, *rest = [*maddr.split("/"), "", ""]
    if "p2p-circuit" in rest:
        return AddressKind.RELAYED
    if family not in ("ip4", "ip6"):
        return AddressKind.NAME
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return AddressKind.NAME
    if address.version == 4 and address in _CARRIER_GRADE:
        return AddressKind.CARRIER
    if address.is_link_local:
        return AddressKind.LINK
    if scope_of(maddr) is Scope.NETWORK and not is_local(host):
        return AddressKind.RESERVED
    kinds = {Scope.MACHINE: AddressKind.LOOPBACK, Scope.NETWORK: AddressKind.PRIVATE, Scope.PUBLIC: AddressKind.PUBLIC}
    return kinds[scope_of(maddr)]


def check_port(config: NetworkConfig, refusal: ConfigError | None) -> Finding:
    """Check whether this machine can listen on `--host-maddrs`.

    Args:
        config: network settings of the peer.
        refusal: the error of `check_host_maddrs`; None if there was none.
    """
    wanted = ", ".join(config.host_maddrs)
    if refusal is not None:
        return failed("port", refusal)
    is_any = all(maddr.rstrip("/").endswith("/0") for maddr in config.host_maddrs)
    return ok("port", f"{wanted}: " + ("a free port, chosen at the first start" if is_any else "free"))


def check_addresses(maddrs: Sequence[str]) -> Finding:
    """Check the addresses of this machine, by kind."""
    by_kind: dict[AddressKind, list[str]] = {}
    for maddr in maddrs:
        by_kind.setdefault(kind_of(maddr), []).append(_host(maddr))
    text = "; ".join(f"{kind.value}: {', '.join(dict.fromkeys(hosts))}" for kind, hosts in by_kind.items())
    if set(by_kind) - {AddressKind.LOOPBACK, AddressKind.LINK}:
        return ok("addresses", text)
    remedy = "--host-maddrs /ip4/0.0.0.0/tcp/0 listens on all addresses; is this machine on a network?"
    return warning("addresses", f"{text or 'none'}: peers on other machines cannot reach this one", remedy)


def check_reachable(config: NetworkConfig, found: Probe) -> Finding:
    """Check whether peers elsewhere can dial us: by an initial peer's dial-back, else from the addresses."""
    for peer in found.peers:
        tried, detail = peer.dialled_back
        if tried is DialBack.REACHED:
            return ok("reachable", f"from anywhere: {short_id(peer.peer_id)} dialled back to {detail}")
        if tried is DialBack.FAILED:
            text = (
                f"not from outside: {short_id(peer.peer_id)} could not dial back (firewall or NAT); this peer "
                "exchanges with other unreachable peers through reachable ones"
            )
            return warning("reachable", text, _forward(config, found.maddrs))
    maddrs = found.maddrs
    kinds = {kind_of(maddr) for maddr in maddrs}
    if config.announce_maddrs:
        text = f"announced as {', '.join(config.announce_maddrs)}; not tested from outside"
        return warning("reachable", text, _try_it(config.announce_maddrs[0]))
    if AddressKind.PUBLIC in kinds:
        public = next(maddr for maddr in maddrs if kind_of(maddr) is AddressKind.PUBLIC)
        listening = public.rpartition("/p2p/")[0] if _fixed_port(config) else f"/ip4/{_host(public)}/tcp/{EXAMPLE_PORT}"
        text = f"{_host(public)} is a public address; not tested for a firewall"
        return warning("reachable", text, _try_it(listening))
    if kinds <= {AddressKind.LOOPBACK, AddressKind.LINK}:
        return warning("reachable", "from this machine only", "see addresses, above")
    return warning(
        "reachable",
        "from this network; others cannot dial this peer (NAT, and the router maps no port), but it can dial public "
        "peers",
        _forward(config, maddrs),
    )


def check_initial_peers(peers: Sequence[InitialPeer]) -> Iterator[Finding]:
    """Yield a finding for each initial peer; one that answers is enough."""
    if not peers:
        yield ok("initial peers", "none given: join looks on the local network, else starts a run")
    bad = Mark.WARNING if any(peer.answered_s is not None for peer in peers) else Mark.FAILED
    for peer in peers:
        where = f"{_host(peer.maddrs[0])} ({short_id(peer.peer_id)})"
        if peer.failure:
            remedy = f"check that the peer runs and that it printed this address: {peer.maddrs[0]}"
            yield Finding("initial peer", bad, f"{where} cannot be reached: {peer.failure}", remedy)
        elif peer.answered_s is None:
            text = f"{where} is reachable, but does not answer as a DHT node"
            yield Finding("initial peer", bad, text, "use an address that a p2ptrain peer printed")
        else:
            reached_ms, answered_ms = 1e3 * peer.reached_s, 1e3 * peer.answered_s
            yield ok("initial peer", f"{where} reached in {reached_ms:.0f} ms, answers in {answered_ms:.0f} ms")


def check_interfaces(peers: Sequence[InitialPeer]) -> Iterator[Finding]:
    """Yield a finding for each initial peer that was reached: the interfaces to it, and whether the best is used."""
    for peer in peers:
        if peer.failure:
            continue
        used = next((way for way in peer.ways if way.used), None)
        if used is None:
            text = f"to {short_id(peer.peer_id)}: not compared: it is on this machine, or reached through a relay"
            yield ok("interfaces", text)
            continue
        better = next((way for way in peer.ways if _is_better(way, used)), None)
        silent = [_interface(way.interface) for way in peer.ways if way.rtt_s is None]
        text = f"to {short_id(peer.peer_id)}: " + ", ".join(
            f"{_interface(way.interface)} {1e3 * way.rtt_s:.1f} ms{_rate(way)}" + (" (used)" if way.used else "")
            for way in peer.ways
            if way.rtt_s is not None
        )
        if silent:
            text += f"; no answer through {', '.join(silent)}"
        if better is None:
            yield ok("interfaces", text)
        else:
            remedy = (
                f"the routing table chooses the interface: give {better.interface.name or better.interface.address} "
                "the lowest metric there (ip route), or turn off the one that is used"
            )
            yield warning("interfaces", text, remedy)


def _is_better(way: Way, used: Way) -> bool:
    """Whether a way is clearly better than the one in use: by its rate, else by its round trip or the card's rate."""
    if way.rtt_s is None or used.rtt_s is None:
        return False
    if way.mbit and used.mbit and max(way.mbit, used.mbit) >= FAR_SLOWER * min(way.mbit, used.mbit):
        return way.mbit > used.mbit
    faster_card = (way.interface.mbit or 0) >= FAR_SLOWER * (used.interface.mbit or math.inf)
    return used.rtt_s > FAR_SLOWER * way.rtt_s + NOISE_S or (faster_card and way.rtt_s <= used.rtt_s + NOISE_S)


def _rate(way: Way) -> str:
    return "" if way.mbit is None else f" and {way.mbit:.{0 if way.mbit >= 10 else 1}f} Mbit/s"


def _interface(interface: Interface) -> str:
    about = [interface.address] if interface.name else []
    about += [f"{interface.mbit} Mbit/s"] if interface.mbit else []
    return (interface.name or interface.address) + (f" ({', '.join(about)})" if about else "")


def check_clock(peers: Sequence[InitialPeer]) -> Finding:
    """Compare our clock with the peers that answered; hivemind's DHT refuses records of a peer whose clock is off."""
    skews = {peer.peer_id: peer.clock_ahead_s for peer in peers if peer.clock_ahead_s is not None}
    if not skews:
        return Finding("clock", Mark.SKIPPED, f"not checked: no initial peer {'answered' if peers else 'given'}")
    peer_id, worst = max(skews.items(), key=lambda item: abs(item[1]))
    off = f"{abs(worst):.1f} s {'ahead of' if worst > 0 else 'behind'} {short_id(peer_id)}"
    if abs(worst) > UNEASY_SKEW_S:
        mark = Mark.FAILED if abs(worst) > MAX_CLOCK_SKEW_S else Mark.WARNING
        return Finding("clock", mark, f"{off}; at most {MAX_CLOCK_SKEW_S:g} s are allowed", CLOCK_REMEDY)
    return ok("clock", f"within {max(abs(worst), 0.1):.1f} s of {count(len(skews), 'peer')}")


def check_run(run_id: str, found: RunConfig | None, members: int) -> Finding:
    """Describe a run that can be joined: its settings, None if no peer answered, and the number of its peers."""
    if found is None:
        text = f"no peers found for run {run_id!r}: join would start it"
        return warning("run", text, "check that --run-id is the same as on the other peers")
    return ok("run", f"{run_id!r}: {count(members, 'peer')}, model {found.model or 'of a program'}")


def check_ways(members: Sequence[MemberInfo]) -> Iterator[Finding]:
    """Check whether the peers of a run have direct connections for rounds and state, as they report."""
    told = {member.peer_id: member.relayed for member in members if member.relayed is not None}
    without = {tuple(sorted((peer_id, other))) for peer_id, relayed in told.items() for other in relayed}
    pairs = math.comb(len(members), 2)
    if not pairs or not told:
        return
    if not without:
        yield ok("direct connections", f"none is missing, {count(len(told), 'peer')} of {len(members)} say")
        return
    blocked = Counter(peer_id for pair in sorted(without) for peer_id in pair)
    most = ", ".join(f"{short_id(peer_id)} ({number})" for peer_id, number in blocked.most_common(MOST_NAMED))
    yield warning(
        "direct connections",
        f"{len(without)} of {pairs} pairs of the run's peers have none, so that rounds and state are slower there; "
        f"most of them at {most}",
        "p2ptrain peers lists them; on one peer of each pair, open a TCP port for --bulk-port, without --bulk off",
    )


def _forward(config: NetworkConfig, maddrs: Sequence[str]) -> str:
    """How to become reachable behind a router."""
    if any(kind_of(maddr) is AddressKind.CARRIER for maddr in maddrs):
        return "the provider shares one address among customers: ask for a public address, or use IPv6"
    port = _fixed_port(config) or EXAMPLE_PORT
    return (
        f"forward TCP port {port} of the router to this machine, then: p2ptrain join "
        f"--host-maddrs /ip4/0.0.0.0/tcp/{port} --announce-maddrs /ip4/PUBLIC-ADDRESS/tcp/{port}"
    )


def _fixed_port(config: NetworkConfig) -> str:
    return next((port for port in map(_port, config.host_maddrs) if port not in ("", "0")), "")


def _try_it(maddr: str) -> str:
    """How to test an address: run a bootstrap node here, and the doctor on a machine elsewhere."""
    listen = f"/ip4/0.0.0.0/tcp/{_port(maddr)}"
    return (
        f"here: p2ptrain bootstrap --host-maddrs {listen} · on a machine elsewhere: p2ptrain doctor "
        f"--initial-peers {maddr}/p2p/ID-THAT-IT-PRINTED"
    )


def _host(maddr: str) -> str:
    parts = maddr.split("/")
    return parts[2] if len(parts) > 2 else maddr


def _port(maddr: str) -> str:
    return [*maddr.split("/"), "", "", "", ""][4]
