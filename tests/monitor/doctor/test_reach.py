"""The doctor's checks of addresses and of the results of a network probe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import short_id
from p2ptrain.monitor.doctor.finding import Finding, Mark, failed
from p2ptrain.monitor.doctor.reach import (
    AddressKind,
    check_addresses,
    check_clock,
    check_initial_peers,
    check_interfaces,
    check_port,
    check_reachable,
    check_run,
    check_ways,
    kind_of,
)
from p2ptrain.network.dial_back import DialBack
from p2ptrain.network.probe import InitialPeer, Probe
from p2ptrain.network.ways import Interface, Way
from p2ptrain.protocol.membership.status import MemberInfo
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig

LOOPBACK, PRIVATE = "/ip4/127.0.0.1/tcp/4001/p2p/QmMe", "/ip4/192.168.1.5/tcp/4001/p2p/QmMe"
PUBLIC = "/ip4/8.8.8.8/tcp/4001/p2p/QmMe"
THERE = InitialPeer("QmPeerAbcdef", ["/ip4/192.168.1.9/tcp/4001/p2p/QmPeerAbcdef"], "", 0.024, 0.003, 0.0)
GONE = InitialPeer("QmPeerUvwxyz", ["/ip4/192.168.1.8/tcp/4001/p2p/QmPeerUvwxyz"], "no answer")
OTHER = InitialPeer("QmPeer123456", ["/ip4/192.168.1.7/tcp/4001/p2p/QmPeer123456"], "", 0.02)


@pytest.mark.parametrize(
    ("maddr", "kind"),
    [
        (LOOPBACK, AddressKind.LOOPBACK),
        ("/ip6/::1/tcp/1", AddressKind.LOOPBACK),
        (PRIVATE, AddressKind.PRIVATE),
        ("/ip6/fd00::2/tcp/1", AddressKind.PRIVATE),
        ("/ip4/100.64.3.4/tcp/1", AddressKind.CARRIER),
        ("/ip6/fe80::1/tcp/1", AddressKind.LINK),
        ("/ip4/169.254.1.1/tcp/1", AddressKind.LINK),
        ("/ip4/192.0.2.2/tcp/1", AddressKind.RESERVED),
        (PUBLIC, AddressKind.PUBLIC),
        ("/ip6/2a00:1450::1/tcp/1", AddressKind.PUBLIC),
        ("/dns4/example.org/tcp/1", AddressKind.NAME),
        ("/ip4/8.8.8.8/tcp/1/p2p/QmR/p2p-circuit/p2p/QmMe", AddressKind.RELAYED),
        ("nonsense", AddressKind.NAME),
    ],
)
def test_kinds_of_addresses(maddr: str, kind: AddressKind) -> None:
    assert kind_of(maddr) is kind


def test_addresses_are_listed_by_kind() -> None:
    finding = check_addresses([PRIVATE, "/ip4/10.0.0.7/tcp/4001/p2p/QmMe", LOOPBACK])
    assert (finding.mark, finding.text) == (
        Mark.OK, "private network: 192.168.1.5, 10.0.0.7; this machine only: 127.0.0.1",
    )  # fmt: skip
    assert check_addresses([LOOPBACK]).mark is check_addresses([]).mark is Mark.WARNING


def test_reachability_from_addresses() -> None:
    config = NetworkConfig()
    behind_nat = check_reachable(config, Probe(0.1, [PRIVATE, LOOPBACK]))
    assert behind_nat.text.startswith("from this network; others cannot dial this peer")
    assert "forward TCP port 4001 of the router" in behind_nat.remedy
    fixed = NetworkConfig(host_maddrs=("/ip4/0.0.0.0/tcp/4001",))
    assert "--announce-maddrs /ip4/PUBLIC-ADDRESS/tcp/4001" in check_reachable(fixed, Probe(0.1, [PRIVATE])).remedy
    assert "ask for a public address" in check_reachable(config, Probe(0.1, ["/ip4/100.64.3.4/tcp/1", PRIVATE])).remedy
    assert check_reachable(config, Probe(0.1, [LOOPBACK])).text == "from this machine only"


def test_an_untested_address_is_reported_with_how_to_test_it() -> None:
    public = check_reachable(NetworkConfig(host_maddrs=("/ip4/0.0.0.0/tcp/4001",)), Probe(0.1, [PUBLIC]))
    assert public.text == "8.8.8.8 is a public address; not tested for a firewall"
    assert public.remedy == (
        "here: p2ptrain bootstrap --host-maddrs /ip4/0.0.0.0/tcp/4001 · on a machine elsewhere: "
        "p2ptrain doctor --initial-peers /ip4/8.8.8.8/tcp/4001/p2p/ID-THAT-IT-PRINTED"
    )
    announced = check_reachable(NetworkConfig(announce_maddrs=("/dns4/example.org/tcp/4001",)), Probe(0.1, [PRIVATE]))
    assert announced.text == "announced as /dns4/example.org/tcp/4001; not tested from outside"


def test_reachability_from_a_dial_back() -> None:
    def tried(result: DialBack, detail: str) -> Finding:
        peer = replace(THERE, dialled_back=(result, detail))
        return check_reachable(NetworkConfig(), Probe(0.1, [PRIVATE], [GONE, peer]))

    reached = tried(DialBack.REACHED, "/ip4/8.8.4.4/tcp/4001")
    assert (reached.mark, reached.text) == (Mark.OK, "from anywhere: …Abcdef dialled back to /ip4/8.8.4.4/tcp/4001")
    failed = tried(DialBack.FAILED, "dial failed")
    assert failed.mark is Mark.WARNING
    assert failed.text.startswith("not from outside: …Abcdef could not dial back")
    assert "forward TCP port" in failed.remedy
    assert tried(DialBack.UNKNOWN, "too many dials").text.startswith("from this network")


def test_ports() -> None:
    assert check_port(NetworkConfig(), None).mark is Mark.OK
    assert check_port(NetworkConfig(host_maddrs=("/ip4/0.0.0.0/tcp/4001",)), None).text.endswith("4001: free")
    refused = check_port(NetworkConfig(), ConfigError("--host-maddrs 'x': in use; choose another one"))
    assert (refused.mark, refused.text, refused.remedy) == (
        Mark.FAILED, "--host-maddrs 'x': in use", "choose another one",
    )  # fmt: skip


def test_one_initial_peer_that_answers_is_enough() -> None:
    assert [finding.mark for finding in check_initial_peers([THERE, GONE, OTHER])] == [
        Mark.OK, Mark.WARNING, Mark.WARNING,
    ]  # fmt: skip
    assert [finding.mark for finding in check_initial_peers([GONE, OTHER])] == [Mark.FAILED, Mark.FAILED]
    assert [finding.mark for finding in check_initial_peers([])] == [Mark.OK]
    reached, gone, other = check_initial_peers([THERE, GONE, OTHER])
    assert reached.text == "192.168.1.9 (…Abcdef) reached in 24 ms, answers in 3 ms"
    assert gone.text == "192.168.1.8 (…Uvwxyz) cannot be reached: no answer"
    assert gone.remedy.endswith("/ip4/192.168.1.8/tcp/4001/p2p/QmPeerUvwxyz")
    assert "does not answer as a DHT node" in other.text


@pytest.mark.parametrize(
    ("ahead_s", "mark", "text"),
    [
        (0.0, Mark.OK, "within 0.1 s of 1 peer"),
        (-0.4, Mark.OK, "within 0.4 s of 1 peer"),
        (1.5, Mark.WARNING, "1.5 s ahead of …Abcdef; at most 3 s are allowed"),
        (-7.0, Mark.FAILED, "7.0 s behind …Abcdef; at most 3 s are allowed"),
        (None, Mark.SKIPPED, "not checked: no initial peer answered"),
    ],
)
def test_clocks(ahead_s: float | None, mark: Mark, text: str) -> None:
    finding = check_clock([InitialPeer("QmPeerAbcdef", [], "", 0.02, 0.003, ahead_s)])
    assert finding.mark is mark
    assert text in finding.text
    assert ("timedatectl" in finding.remedy) == (mark in (Mark.WARNING, Mark.FAILED))


def test_a_clock_is_not_compared_without_initial_peers() -> None:
    assert check_clock([]) == Finding("clock", Mark.SKIPPED, "not checked: no initial peer given")


def test_runs() -> None:
    assert check_run("r", RunConfig(model="gpt-demo"), 3).text == "'r': 3 peers, model gpt-demo"
    assert check_run("r", None, 0).mark is Mark.WARNING
    assert failed("run", ConfigError("lr: you gave 1; leave it out")).remedy == "leave it out"


CABLE, WIFI = Interface("192.168.1.5", "eth0", 1000), Interface("192.168.1.6", "wlan0")
OLD_CABLE, BRIDGE = Interface("192.168.1.7", "eth1", 100), Interface("172.17.0.1", "docker0")


@pytest.mark.parametrize(
    ("ways", "better"),
    [
        ([Way(CABLE, 0.004, True)], ""),
        ([Way(CABLE, 0.004, True), Way(WIFI, 0.012, False), Way(BRIDGE, None, False)], ""),
        ([Way(WIFI, 0.004, False), Way(CABLE, 0.006, True)], ""),  # round trips of one path differ as much
        ([Way(CABLE, 0.004, False), Way(WIFI, 0.2, True)], "eth0"),
        ([Way(CABLE, 0.005, False), Way(OLD_CABLE, 0.004, True)], "eth0"),
        ([Way(OLD_CABLE, 0.004, True), Way(CABLE, 0.4, False)], ""),
        ([Way(Interface("10.0.0.1"), 0.004, False), Way(Interface("10.0.0.2"), 0.4, True)], "10.0.0.1"),
        ([Way(CABLE, 0.005, False, mbit=94.0), Way(WIFI, 0.004, True, mbit=2.4)], "eth0"),
        ([Way(CABLE, 0.4, False, mbit=94.0), Way(WIFI, 0.004, True, mbit=2.4)], "eth0"),  # a round is its bytes
        ([Way(WIFI, 0.004, False, mbit=2.4), Way(CABLE, 0.4, True, mbit=94.0)], ""),
        ([Way(CABLE, 0.005, False, mbit=94.0), Way(WIFI, 0.004, True, mbit=60.0)], ""),  # less than twice
        ([Way(CABLE, 0.004, False, mbit=94.0), Way(WIFI, 0.2, True)], "eth0"),  # one rate says nothing
    ],
)
def test_a_better_interface_than_the_one_that_is_used_is_reported(ways: list[Way], better: str) -> None:
    (finding,) = check_interfaces([replace(THERE, ways=ways)])
    assert finding.mark is (Mark.WARNING if better else Mark.OK)
    assert (f"give {better} the lowest metric" in finding.remedy) == bool(better)


def test_the_ways_to_a_peer_are_listed_with_the_one_that_is_used() -> None:
    ways = [Way(CABLE, 0.0042, True), Way(WIFI, 0.0121, False), Way(BRIDGE, None, False)]
    (finding,) = check_interfaces([replace(THERE, ways=ways), GONE])
    assert finding.text == (
        "to …Abcdef: eth0 (192.168.1.5, 1000 Mbit/s) 4.2 ms (used), wlan0 (192.168.1.6) 12.1 ms; "
        "no answer through docker0 (172.17.0.1)"
    )


def test_a_peer_on_this_machine_has_no_ways_to_compare() -> None:
    (finding,) = check_interfaces([THERE, GONE])
    assert finding.text == "to …Abcdef: not compared: it is on this machine, or reached through a relay"


def test_the_rates_that_were_measured_are_listed() -> None:
    ways = [Way(CABLE, 0.0042, True, mbit=93.71), Way(WIFI, 0.0121, False, mbit=2.44)]
    (finding,) = check_interfaces([replace(THERE, ways=ways)])
    assert finding.text == (
        "to …Abcdef: eth0 (192.168.1.5, 1000 Mbit/s) 4.2 ms and 94 Mbit/s (used), "
        "wlan0 (192.168.1.6) 12.1 ms and 2.4 Mbit/s"
    )


def test_pairs_without_a_direct_connection_are_counted_once() -> None:
    def member(peer_id: str, **relayed: str) -> MemberInfo:
        return MemberInfo(peer_id, (), "trainer", "training", 1, 1, "0-a", 1.0, (), relayed)

    silent = MemberInfo("z", (), "trainer", "training", 1, 1, "0-a", 1.0, ())
    assert list(check_ways([])) == list(check_ways([member("a")])) == list(check_ways([silent, silent])) == []
    (finding,) = check_ways([member("a"), member("b"), silent])
    assert (finding.mark, finding.text) == (Mark.OK, "none is missing, 2 peers of 3 say")
    (finding,) = check_ways([member("a", b="", c="Qm"), member("b", a=""), member("c")])
    assert finding.mark is Mark.WARNING
    assert finding.text.startswith("2 of 3 pairs of the run's peers have none")
    assert finding.text.endswith(f"most of them at {short_id('a')} (2), {short_id('b')} (1), {short_id('c')} (1)")
