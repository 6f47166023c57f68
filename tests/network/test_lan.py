"""What is read of other machines' records, and what is decided by it."""

from __future__ import annotations

import dataclasses
from ipaddress import ip_network

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.network import lan
from p2ptrain.network.lan import CLOSED, Announcement, LanRun, parse, record_of, runs_of
from p2ptrain.protocol.wire.text import escaped
from p2ptrain.settings.config import RUN_ID
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.run_key import RunKey

A = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
B = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
ONE = Announcement(
    run_id="novels ü", model="gpt-demo", parameters=812_544, peers=2, step=120, founder=B, peer_id=A,
    addresses=(f"/ip4/192.168.1.5/tcp/4001/p2p/{A}", f"/ip6/fd00::5/udp/4001/quic-v1/p2p/{A}"),
)  # fmt: skip
KEY = RunKey(bytes(32))


def encoded(record: dict[str, str] | None) -> dict[bytes, bytes | None]:
    assert record is not None
    return {name.encode(): value.encode() for name, value in record.items()}


def changed(**texts: str | bytes | None) -> dict[bytes, bytes | None]:
    values = {name.encode(): text.encode() if isinstance(text, str) else text for name, text in texts.items()}
    return {**encoded(record_of(ONE)), **values}


@pytest.mark.parametrize("one", [ONE, CLOSED, dataclasses.replace(ONE, founder="", model="", peers=0)])
def test_a_record_says_what_was_announced(one: Announcement) -> None:
    assert parse(encoded(record_of(one))) == one


def test_a_record_of_a_closed_run_says_only_that_there_is_one() -> None:
    assert record_of(CLOSED) == {"v": "1", "key": "1"}
    # Whatever else another machine adds to it.
    assert parse(changed(key="1")) == CLOSED


def test_a_run_whose_name_does_not_fit_is_not_announced() -> None:
    assert record_of(dataclasses.replace(ONE, run_id="東" * 128)) is None


@pytest.mark.parametrize(
    "texts",
    [
        {"v": "2"}, {"key": "2"}, {"key": ""}, {"run": ""}, {"run": "a/b"}, {"run": "a\nb"}, {"run": "a\u202eb"},
        {"run": "x" * 129}, {"run": b"\xff"}, {"run": None}, {"id": "me"}, {"id": A + "\n"}, {"founder": "me"},
        {"step": "-1"}, {"step": "1.5"}, {"step": "٣"}, {"step": "9" * 16}, {"step": str(lan.MAX_STEP + 1)},
        {"params": ""}, {"peers": "1_0"}, {"peers": str(lan.MAX_PEERS + 1)}, {"model": b"\xff"},
        {"a0": "/ip4/203.0.113.7/tcp/4001"}, {"a0": "/ip4/127.0.0.1/tcp/4001"}, {"a0": "/ip4/192.168.1.5/tcp/0"},
        {"a0": "/ip4/192.168.1.5/tcp/65536"}, {"a0": f"/ip4/192.168.1.5/tcp/1/p2p/{B}"}, {"a0": "/dns4/a/tcp/1"},
        {"a0": "/ip4/192.168.1.5/tcp/1/p2p-circuit"}, {"a0": "/ip6/::ffff:192.168.1.5/tcp/1"},
        {"a0": "/ip4/10.1/tcp/1"}, {"a1": "/ip6/2001:db8::1/tcp/1"}, {"a1": "/unix/tmp/x"}, {"a0": None},
        {"a0": "/ip4/fd00::5/tcp/1"},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_breaks_a_rule_is_ignored(texts: dict[str, str | bytes | None]) -> None:
    assert parse(changed(**texts)) is None


def test_a_record_without_addresses_is_ignored() -> None:
    assert parse({name: text for name, text in changed().items() if name not in (b"a0", b"a1")}) is None


def test_a_models_name_cannot_command_a_terminal() -> None:
    parsed = parse(changed(model="gpt\x1b[2J\n" + "x" * 200))
    assert parsed is not None
    assert parsed.model == ("gpt\\x1b[2J\\n" + "x" * 200)[: lan.MAX_MODEL_CHARS]


NAMES = sorted(lan._NAMES)
VALUES = st.one_of(
    st.binary(max_size=255), st.none(), st.text(max_size=80).map(lambda text: text.encode(errors="replace")),
    st.sampled_from(list(changed().values())), st.integers().map(lambda number: str(number).encode()),
    st.from_regex(r"/ip[46]/[0-9a-f:.]{2,20}/tcp/\d{1,5}").map(lambda text: text.encode(errors="replace")),
)  # fmt: skip


@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.binary(max_size=9)), VALUES, max_size=6))
def test_whatever_comes_is_safe_to_print_and_leads_into_the_local_network(texts: dict[bytes, bytes | None]) -> None:
    one = parse({**changed(), **texts})
    if one is None or one == CLOSED:
        return
    assert RUN_ID.fits(one.run_id)
    assert all(escaped(text) == text for text in (one.run_id, one.model, one.founder, one.peer_id, *one.addresses))
    assert len(one.model) <= lan.MAX_MODEL_CHARS
    assert 0 <= one.parameters <= lan.MAX_PARAMETERS
    assert 0 <= one.peers <= lan.MAX_PEERS
    assert 0 <= one.step <= lan.MAX_STEP
    assert 0 < len(one.addresses) <= lan.MAX_ADDRESSES
    for address in one.addresses:
        assert lan.is_local(address.split("/")[2])
        assert address.endswith(f"/p2p/{one.peer_id}")


def test_peers_of_one_run_are_one_run_and_another_founders_is_another() -> None:
    other = dataclasses.replace(
        ONE, peer_id=B, step=130, addresses=tuple(address.replace(A, B) for address in ONE.addresses)
    )
    false = dataclasses.replace(ONE, founder=A, peer_id=A)
    node = dataclasses.replace(ONE, founder="", peer_id="Qm" + "a" * 44, model="", peers=0)
    of_node, first, second = runs_of([ONE, node, CLOSED, false, other, ONE])
    # One address of each peer before a second one: a ticket holds six.
    addresses = (other.addresses[0], ONE.addresses[0], other.addresses[1], ONE.addresses[1])
    assert first == LanRun("novels ü", "gpt-demo", 812_544, 2, 130, B, addresses)
    assert (second.founder, second.addresses) == (A, ONE.addresses)
    assert (first.ticket.founder, second.ticket.founder) == (B, A)
    assert (of_node.founder, of_node.addresses) == ("", node.addresses)


@pytest.mark.parametrize(
    ("found", "setting", "can_ask", "does"),
    [
        (0, "auto", True, "start"), (0, "join", False, "start"), (1, "auto", True, "ask"), (1, "auto", False, "refuse"),
        (1, "join", True, "join"), (1, "join", False, "join"), (2, "on", True, "ask"), (2, "join", True, "refuse"),
    ],
)  # fmt: skip
def test_what_a_peer_does_with_the_runs_that_it_finds(found: int, setting: str, can_ask: bool, does: str) -> None:
    assert lan.decide(found, lan=setting, can_ask=can_ask) == does


@pytest.mark.parametrize(
    ("setting", "in_container", "closed", "looks", "announces"),
    [
        ("auto", False, False, True, True), ("auto", True, False, False, False), ("on", True, False, True, True),
        ("join", True, False, True, True), ("off", False, False, False, False), ("auto", False, True, False, False),
        ("on", False, True, False, True), ("join", False, True, False, False),
    ],
)  # fmt: skip
def test_who_looks_and_who_announces(
    setting: str, in_container: bool, closed: bool, looks: bool, announces: bool
) -> None:
    config = NetworkConfig(lan=setting, key=KEY if closed else None)
    assert lan.looks(config, in_container=in_container) == looks
    assert lan.announces(config, in_container=in_container) == announces


def test_a_run_with_an_allow_list_is_closed() -> None:
    config = NetworkConfig(allow="friends.txt")
    assert not lan.announces(config, in_container=False)
    assert lan.looks(config, in_container=False)


@pytest.mark.parametrize(
    ("listening", "hosts"),
    [
        ("/ip4/0.0.0.0/tcp/0", ["192.168.1.5", "10.0.0.2"]), ("/ip4/127.0.0.1/tcp/0", []),
        ("/ip4/10.0.0.2/tcp/4001", ["10.0.0.2"]), ("/ip4/203.0.113.7/tcp/4001", []), ("/ip6/::/tcp/0", []),
    ],
)  # fmt: skip
def test_a_peer_speaks_on_the_local_networks_on_which_it_listens(listening: str, hosts: list[str]) -> None:
    own = ["192.168.1.5", "203.0.113.7", "10.0.0.2", "fd00::5"]
    assert lan.local_hosts([listening], own) == hosts


def test_a_peer_on_loopback_neither_opens_a_socket_nor_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan, "NetworkThread", None)
    assert lan.look(lan.hosts_of(["/ip4/127.0.0.1/tcp/0"])) == []


def test_a_record_names_only_addresses_of_local_networks() -> None:
    mine = [f"/ip4/127.0.0.1/tcp/1/p2p/{A}", f"/ip4/8.8.8.8/tcp/1/p2p/{A}"]
    near = [f"/ip4/10.0.0.{number}/tcp/1/p2p/{A}" for number in range(9)]
    assert lan.local_maddrs([*mine, *near]) == tuple(near[: lan.MAX_ADDRESSES])


def test_a_bootstrap_node_leads_to_a_run_of_any_founder() -> None:
    node = lan.Announcement(run_id="novels", peer_id=A, addresses=(f"/ip4/10.0.0.1/tcp/1/p2p/{A}",))
    runs = lan.runs_of([node])
    assert lan.matching(runs, "novels", founder=B) == lan.matching(runs, None) == runs
    assert lan.matching(runs, "poems") == []


def test_announcing_goes_on_after_an_error_and_with_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    networks = iter([[], ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.2"]])

    async def begin(work: object) -> None:
        began.append(hosts[-1])
        if len(began) == 1:
            raise OSError("no route")

    hosts: list[list[str]] = []
    monkeypatch.setattr(lan, "hosts_of", lambda _: hosts.append(next(networks)) or hosts[-1])
    monkeypatch.setattr(lan, "_announce", lambda *_: None)
    monkeypatch.setattr(lan, "from_asyncio", begin)

    async def main() -> None:
        with trio.move_on_after(3.5 * lan.UPDATE_EVERY_S):
            await lan.announce(lambda: lan.CLOSED, ["/ip4/0.0.0.0/tcp/0"])

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert began == [["10.0.0.1"], ["10.0.0.2"], ["10.0.0.2"]]


def test_addresses_of_other_networks_are_left_out() -> None:
    near, behind = f"/ip4/192.168.1.5/tcp/1/p2p/{A}", f"/ip4/10.8.0.1/tcp/22/p2p/{A}"
    networks = [ip_network("192.168.1.0/24")]
    one = Announcement(run_id="novels", peer_id=A, addresses=(behind, near))
    assert lan.nearby(one, networks) == dataclasses.replace(one, addresses=(near,))
    assert lan.nearby(dataclasses.replace(one, addresses=(behind,)), networks) is None
    assert lan.nearby(CLOSED, networks) == CLOSED


def test_an_id_that_is_no_hash_names_no_peer() -> None:
    record = record_of(Announcement(run_id="novels", peer_id=A, addresses=(f"/ip4/10.0.0.1/tcp/1/p2p/{A}",)))
    assert record is not None
    assert parse({name.encode(): value.encode() for name, value in record.items()}) is not None
    record["id"] = 52 * "1"
    assert parse({name.encode(): value.encode() for name, value in record.items()}) is None
