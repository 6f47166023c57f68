"""Strikes: counted per identity, forgotten after ten minutes, bounded, and told to those who ask."""

from __future__ import annotations

import json

import pytest
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links import limits
from p2ptrain.protocol.links.limits import MAX_STRIKES, STRIKE_S, Strikes, Struck
from p2ptrain.protocol.membership.status import list_members, parse_relayed, parse_strikes
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.test_rounds import common, start_all
from tests.protocol.wiring import linked_pair, until


def test_each_strike_expires_ten_minutes_after_it_was_given() -> None:
    given = Strikes()
    assert [given.add("x", "lied", now) for now in (0.0, 100.0, 200.0)] == [1, 2, 3]
    assert [given.count("x", now) for now in (599.0, 600.0, 700.0, 799.9, 800.0)] == [3, 2, 1, 1, 0]
    assert not given._given


def test_only_the_last_three_count_and_several_can_be_given_at_once() -> None:
    given = Strikes()
    for now in range(50):
        given.add("x", "lied", float(now))
    assert given.count("x", 60.0) == MAX_STRIKES
    assert given.count("x", 48.0 + STRIKE_S) == 1
    assert given.add("y", "cheated", 0.0, count=MAX_STRIKES) == MAX_STRIKES
    assert given.count("y", STRIKE_S) == 0


def test_memory_is_bounded_and_reasons_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRUCK", 4)
    given = Strikes()
    for number in range(9):
        given.add(f"x{number}", "\x1b[2J\n" + 1000 * "a", float(number))
    given.add("x5", "again", 9.0)
    assert given.counts(10.0) == {"x6": 1, "x7": 1, "x8": 1, "x5": 2}
    assert given._given.keys() == {"x6", "x7", "x8", "x5"}
    assert given.latest(2, 10.0) == [
        Struck("x5", 2, "again", 1.0), Struck("x8", 1, (r"\x1b[2J\n" + 1000 * "a")[: limits.MAX_REASON], 2.0),
    ]  # fmt: skip


def test_a_strike_of_the_owner_closes_the_link_and_three_refuse_for_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, _):
            a.links.strike("b", "a wrong mean")
            await until(lambda: bool(a.lost) and bool(b.lost))
            assert link.lost_reason == "it broke the protocol: a wrong mean"
            await b.links.connect("a", [])
            await until(lambda: a.linked == ["b", "b"])
            a.links.strike("b", "a wrong mean\x1b[2J", count=MAX_STRIKES)
            await until(lambda: len(a.lost) == 2)
            for end, other in ((a, "b"), (b, "a")):
                with pytest.raises(PeerLostError):
                    await end.links.connect(other, [])
            [struck] = a.links.struck(9)
            assert (struck.peer_id, struck.count) == ("b", 3)
            assert struck.reason == r"broke the protocol: a wrong mean\x1b[2J"
            await trio.sleep(STRIKE_S)
            await b.links.connect("a", [])
            await until(lambda: len(a.linked) == 3)

    run_virtual(main)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "b broke the protocol: a wrong mean (strike 1 of 3)",
        r"b broke the protocol: a wrong mean\x1b[2J (strike 3 of 3; refused for 10 minutes)",
    ]


def test_observers_are_told_whom_each_member_has_struck() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2))
            s.peers["a"].node.links.strike("x", "\x1b[2J", count=2)
            await trio.sleep(30)
            infos = await list_members(s.network.transport("observer"), s.network.directory("observer"), "test")
            told = {info.peer_id: [(s.peer_id, s.count, s.reason) for s in info.strikes] for info in infos}
            assert told == {"a": [("x", 2, r"broke the protocol: \x1b[2J")], "b": []}
            assert 30 <= infos[0].strikes[0].age_s < 40

    run_virtual(main)


def test_observers_are_told_which_links_are_relayed() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            s.network.relays[frozenset("ab")] = "r"
            s.network.can_dial_bulk = lambda source, target: {source, target} != {"b", "c"}
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            infos = await list_members(s.network.transport("observer"), s.network.directory("observer"), "test")
            assert {info.peer_id: info.relayed for info in infos} == {
                "a": {"b": "r"}, "b": {"a": "r", "c": ""}, "c": {"b": ""},
            }  # fmt: skip

    run_virtual(main)


def test_relayed_links_that_a_member_tells_are_made_safe_to_print() -> None:
    told = parse_relayed(json.dumps({"x\n": "\x1b[2J" + 500 * "y"}).encode())
    assert told == {r"x\n": (r"\x1b[2J" + 500 * "y")[:128]}


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"x":1}', b"\xff", b"[" * 100_000, b" " * 70_000])
def test_what_is_no_list_of_relayed_links_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        parse_relayed(payload)


STRUCK = {"peer_id": "x", "count": 1, "reason": "lied", "age_s": 3.0}


def test_what_a_member_tells_is_made_safe_to_print() -> None:
    told = parse_strikes(json.dumps([STRUCK | {"peer_id": "x\n" + 500 * "y", "reason": "\x9b2J" + 500 * "z"}]).encode())
    assert told == (Struck((r"x\n" + 500 * "y")[:128], 1, (r"\x9b2J" + 500 * "z")[: limits.MAX_REASON], 3.0),)
    assert parse_strikes(b"[]") == ()


@pytest.mark.parametrize(
    "lie",
    [{"count": 0}, {"count": -1}, {"count": 2**40}, {"count": 1.5}, {"count": "3"}, {"age_s": -1.0}, {"age_s": "x"},
     {"age_s": None}, {"reason": 7}, {"peer_id": None}, {"peer_id": ["x"]}],
)  # fmt: skip
def test_impossible_strikes_are_refused(lie: dict[str, object]) -> None:
    with pytest.raises(WireError):
        parse_strikes(json.dumps([STRUCK | lie]).encode())


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b"[", b"[1]", b"\xff", b"[" * 100_000, b" " * 70_000, b'[{"age_s":1e999}]',
     b'[{"new":' + b"[" * 60_000],
)  # fmt: skip
def test_what_is_no_list_of_strikes_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        parse_strikes(payload)
