"""Decides by addresses which peers can be dialled. A machine behind NAT has only addresses of its own network.

Names, relayed addresses and all other addresses that are not IP addresses count as public.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterable


class Scope(enum.Enum):
    """From where an address can be dialled."""

    MACHINE = "this machine"
    NETWORK = "the same network"
    PUBLIC = "anywhere"


def scope_of(maddr: str) -> Scope:
    """From where a multiaddr can be dialled."""
    _, family, host, *_ = [*maddr.split("/"), "", ""]
    if family not in ("ip4", "ip6") or is_relayed(maddr):
        return Scope.PUBLIC
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Scope.PUBLIC
    if address.is_loopback:
        return Scope.MACHINE
    return Scope.PUBLIC if address.is_global else Scope.NETWORK


def network_of(maddr: str) -> str:
    """The network of an IP address that one provider or institution mostly has: /16 of IPv4, /32 of IPv6; else ""."""
    _, family, host, *_ = [*maddr.split("/"), "", ""]
    try:
        return str(ipaddress.ip_network(f"{host}/{16 if family == 'ip4' else 32}", strict=False))
    except ValueError:
        return ""


def is_relayed(maddr: str) -> bool:
    """Whether a multiaddr leads through a relay."""
    return "p2p-circuit" in maddr.split("/")


def is_direct_public(maddr: str) -> bool:
    """Whether a multiaddr can be dialled from anywhere, without a relay."""
    return scope_of(maddr) is Scope.PUBLIC and not is_relayed(maddr)


def relay_of(maddr: str) -> str:
    """The peer id of the relay through which a multiaddr leads; empty if there is none."""
    return maddr.partition("/p2p-circuit")[0].rpartition("/p2p/")[2] if is_relayed(maddr) else ""


def is_public(maddrs: Iterable[str]) -> bool:
    """Whether a peer with these addresses can be dialled from anywhere."""
    return any(scope_of(maddr) is Scope.PUBLIC for maddr in maddrs)


def rank_for_anyone(maddr: str) -> int:
    """The place of an address for peers that may be anywhere: public, relayed, local, loopback."""
    if is_relayed(maddr):
        return 1
    return {Scope.PUBLIC: 0, Scope.NETWORK: 2, Scope.MACHINE: 3}[scope_of(maddr)]


def best_first(maddrs: Iterable[str]) -> list[str]:
    """Sort addresses for peers that may be anywhere: public, then relayed, then local ones.

    Loopback addresses are included only if there are no others.
    """

    found = sorted(maddrs, key=rank_for_anyone)
    return [maddr for maddr in found if scope_of(maddr) is not Scope.MACHINE] or found


def worth_dialling(own: Iterable[str], theirs: Iterable[str]) -> bool:
    """Whether a peer with addresses `own` may reach one with addresses `theirs`.

    Two peers with private addresses may be in the same network. A machine that has only public addresses is in no
    private network. If a peer has no addresses here, libp2p's own directory may have some.
    """
    ours, scopes = {scope_of(maddr) for maddr in own}, {scope_of(maddr) for maddr in theirs}
    if scopes != {Scope.MACHINE}:
        # A peer on our machine also has addresses in all of its networks.
        scopes -= {Scope.MACHINE}
    return not scopes or Scope.PUBLIC in scopes or not ours or bool(scopes & ours)
