"""Addresses for other peers, and addresses received from them."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.network._hivemind import Multiaddr, PeerID
from p2ptrain.network.addresses import MAX_HINTS, by_peer_id, check_initial_peers, dialable, hints, is_initial_peer

TICKET = "p2pt1" + "ab" * 40
PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_public_addresses_come_first_loopback_last_and_nothing_twice() -> None:
    found = [
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/10.0.0.2/tcp/1",
        "/ip6/::1/tcp/1",
        "/dns4/example.org/tcp/1",
        "/ip6/fd00::2/tcp/1",
    ]
    assert dialable([Multiaddr(text) for text in [*found, *found]], PEER) == [
        f"/dns4/example.org/tcp/1/p2p/{PEER}",
        f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}",
        f"/ip6/fd00::2/tcp/1/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",
        f"/ip6/::1/tcp/1/p2p/{PEER}",
    ]


def test_hints_of_strangers() -> None:
    good = Multiaddr("/ip4/10.0.0.2/tcp/1").to_bytes()
    assert hints([f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}", "/ip4/10.0.0.2/tcp/1"], PEER) == [good, good]
    assert hints(["", "junk", "/ip4/300.0.0.1/tcp/1", "/p2p/\N{SNOWMAN}"], PEER) == []
    assert len(hints(["/ip4/10.0.0.2/tcp/1"] * 100, PEER)) == MAX_HINTS


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        (f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}", True),
        (f"/dns4/example.org/tcp/1/p2p/{PEER}", True),
        (f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}", True),
        (f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}/p2p-circuit", False),
        ("/ip4/10.0.0.2/tcp/1", False),
        (f"/p2p/{PEER}", False),
        (f"/ip4/10.0.0.2/tcp/99999/p2p/{PEER}", False),
        (f"/ip4/10.0.0.2/tcp/1\n/p2p/{PEER}", False),
        (f"/dns4/example.org /tcp/1/p2p/{PEER}", False),
        ("/ip4/10.0.0.2/tcp/1/p2p/0OIl", False),
        ("", False),
        ("/", False),
        ("//", False),
    ],
)
def test_what_a_run_can_be_joined_through(text: str, usable: bool) -> None:
    assert is_initial_peer(text) is usable


@pytest.mark.parametrize("text", [TICKET, f"{TICKET} ", f"/ip4/{TICKET}/tcp/1", f"/dns4/{TICKET}/tcp/1"])
def test_a_ticket_in_place_of_an_address_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^initial peer .*p2pt1…") as caught:
        check_initial_peers([text])
    assert "abab" not in str(caught.value)


def test_an_address_through_a_relay_has_the_relays_id_as_p2pd_writes_it() -> None:
    relay = "QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"
    direct, identity = Multiaddr("/ip4/10.0.0.2/tcp/1").to_bytes(), PeerID.from_base58(relay).to_bytes()
    (encoded,) = hints([f"/ip4/10.0.0.2/tcp/1/p2p/{relay}/p2p-circuit/p2p/{PEER}"], PEER)
    assert encoded == direct + b"\xa5\x03\x22" + identity + b"\xa2\x02"
    assert hints(["/ip4/10.0.0.2/tcp/1/p2p/0OIl/p2p-circuit"], PEER) == []


def test_addresses_of_one_peer_belong_together() -> None:
    first, second = f"/ip4/10.0.0.2/tcp/1/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    other = "/ip4/10.0.0.3/tcp/1/p2p/QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"
    assert list(by_peer_id([first, other, second]).values()) == [[first, second], [other]]
