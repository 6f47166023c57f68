"""How many messages a peer may send, and what breaking the rules costs: the link, and at three strikes all links."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links import limits
from p2ptrain.protocol.links.flow_control import ACK_EVERY_BYTES
from p2ptrain.protocol.links.limits import (
    ANSWER_BYTES,
    BEATS_PER_S,
    FRAGMENTS_PER_S,
    MAX_GONE,
    MAX_STRIKES,
    STRIKE_S,
    UNITS_PER_S,
    MessageRates,
    PeerRates,
    Strikes,
    Struck,
)
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link
from p2ptrain.protocol.wire.messages import Ack, Due, Fragment, Message, Request
from tests.protocol.swarm import RUN, common, run_virtual, start_all, swarm
from tests.protocol.wire.test_messages import BEAT
from tests.protocol.wiring import endpoints, linked_pair, until

FRAGMENT = Fragment("0-l", 3, "cyclic", 0, 0, 1, 50, 0.0)
BURST_S = PEER_TIMEOUT_S


@pytest.mark.parametrize(
    ("message", "size_bytes", "per_s", "what"),
    [
        (BEAT, 100, BEATS_PER_S, "5 heartbeats"),
        (FRAGMENT, 5000, FRAGMENTS_PER_S, "25 fragments"),
        (Due("0-l", 3, 0), 60, UNITS_PER_S, "200 control messages"),
        (Request(1, "nothing", "", 0), 60, UNITS_PER_S, "200 control messages"),
        (Ack(), 25, UNITS_PER_S, "200 control messages"),
        (Due("0-l", 3, 0), 256 * 1024, UNITS_PER_S / 65, "200 control messages"),
    ],
)
def test_each_kind_has_its_limit(message: Message, size_bytes: int, per_s: float, what: str) -> None:
    rates, now, passed = MessageRates(BURST_S, 0.0), 0.0, 0
    with pytest.raises(WireError, match=f"more than {what} a second"):
        while True:
            rates.check(message, size_bytes, 0, now)
            passed += 1
            now += 1 / (100 * per_s)
    assert passed == pytest.approx(per_s * BURST_S, rel=0.02)
    # At the allowed rate it goes on without end.
    rates = MessageRates(BURST_S, 0.0)
    for turn in range(20_000):
        rates.check(message, size_bytes, 0, turn * 1.01 / per_s)


def test_acknowledgements_of_what_was_sent_and_requests_that_are_answered_cost_nothing() -> None:
    rates = MessageRates(BURST_S, 0.0)
    for _ in range(50_000):
        rates.check(Ack(), 25, ACK_EVERY_BYTES, 0.0)
        rates.check(Request(1, "part", "", 0), 60, 0, 0.0)
        rates.note_answered(ANSWER_BYTES)
    with pytest.raises(WireError):
        for _ in range(50_000):
            rates.check(Request(1, "part", "", 0), 60, 0, 0.0)
            rates.note_answered(ANSWER_BYTES - 1)


def test_unrequested_answers_are_bounded() -> None:
    rates = MessageRates(BURST_S, 0.0)
    for _ in range(12):  # all requests under way were given up
        rates.check_unasked(256 * 1024, 0.0)
    with pytest.raises(WireError, match="not requested"):
        for _ in range(12):
            rates.check_unasked(4 * 1024 * 1024, 0.0)


def beat(link: Link, sender: str) -> None:
    link.make_beat(lambda *times: msgspec.structs.replace(BEAT, sent_s=times[0]))


FLOODS: list[tuple[str, Callable[[Link, str], None]]] = [
    ("beats", beat),
    ("dues", lambda link, sender: link.send(Due("0-l", 3, 0))),
    ("requests", lambda link, sender: link.send(Request(7, "record", "nothing", 0))),
    ("acknowledgements", lambda link, sender: link.send(Ack())),
]


@pytest.mark.parametrize(("name", "send"), FLOODS, ids=[name for name, _ in FLOODS])
def test_a_flood_costs_the_flooder_its_link_and_a_strike(name: str, send: Callable[[Link, str], None]) -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, other):
            sent = 0
            while not other.lost.is_set():
                send(link, "a")
                sent += 1
                assert sent < 20_000
                await trio.sleep(0.0001)
            assert b.links.strikes == {"a": 1}
            assert "a second" in other.lost_reason
            assert len(b.received) <= UNITS_PER_S * (BURST_S + 5)
            await until(lambda: bool(a.lost))

    run_virtual(main)


def test_a_flooder_that_links_anew_is_struck_three_times() -> None:
    """It stays below the limit of one link, and then makes another."""

    async def main() -> None:
        async with endpoints(MemoryNetwork(), "a", "b") as (a, b):
            for _ in range(20):
                try:
                    link = await a.links.connect("b", [])
                except PeerLostError:
                    break
                for _ in range(1000):
                    link.send(Due("0-l", 3, 0))
                await trio.sleep(1)
                link.close("again")
                await until(lambda: not a.links.live and not b.links.live)
            assert b.links.strikes == {"a": 3}
            assert UNITS_PER_S * BURST_S <= len(b.received) <= UNITS_PER_S * (BURST_S + 20) + 20

    run_virtual(main)


def test_limits_are_remembered_for_as_long_as_they_differ_from_new_ones() -> None:
    rates = PeerRates(BURST_S)
    first = rates.of("x", 0.0)
    assert rates.of("x", 1e6) is first  # never gone
    rates.note_gone("x", 1e6)
    assert rates.of("x", 1e6 + BURST_S - 1) is first
    rates.note_gone("x", 1e6 + BURST_S)
    assert rates.of("x", 1e6 + 2 * BURST_S) is not first


def test_the_number_of_remembered_limits_is_bounded() -> None:
    rates = PeerRates(BURST_S)
    linked = rates.of("linked", 0.0)
    for number in range(MAX_GONE + 10):
        rates.of(f"x{number}", 0.0)
        rates.note_gone(f"x{number}", 0.0)
    assert len(rates._rates) == MAX_GONE + 1
    assert rates.of("linked", 0.0) is linked


def test_what_gathers_while_a_process_is_held_up_is_no_flood() -> None:
    """A pause of the time after which the other side gives up: all of it is read at once."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, _):
            for _ in range(int(PEER_TIMEOUT_S)):
                beat(link, "a")
                beat(link, "a")
                for _ in range(20):
                    link.send_fragment(lambda: FRAGMENT, bytes(100))
                    await trio.sleep(0)
                for _ in range(160):
                    link.send(Due("0-l", 3, 0))
                await trio.sleep(0.001)
            await trio.sleep(2)
            assert not a.lost
            assert not b.lost
            assert len(b.of(Due)) == 160 * PEER_TIMEOUT_S

    run_virtual(main)


def test_members_of_a_swarm_come_nowhere_near_the_limits() -> None:
    """Rounds one after the other, a joiner, fragments at every step: at most a tenth of each burst is used."""

    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 3, 4))
            joiner = s.start("e")
            await s.until(lambda: len(joiner.rounds("committed")) >= 2)
            for peer in s.peers.values():
                for link in peer.node.links.live.values():
                    for bucket in (link.rates._beats, link.rates._fragments, link.rates._others):
                        assert bucket._tokens > 0.9 * bucket._burst
                assert not peer.node.links.strikes

    run_virtual(main)


def test_a_member_that_floods_stops_neither_steps_nor_rounds() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 1, 4))

            async def flood() -> None:
                while True:
                    for link in s.peers["x"].node.links.trainers():
                        for _ in range(20):
                            beat(link, "x")
                            link.send(Due("0-l", 3, 0))
                    await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(flood)
                await s.until(
                    lambda: all(s.peers[name].node.links.strikes.get("x") == 3 for name in "abc"), within_s=60
                )
                head, steps = s.peers["a"].node.driver.head.round, len(s.peers["a"].reports)
                began = trio.current_time()
                await s.until(lambda: all(s.peers[n].node.driver.head.round >= head + 5 for n in "abc"), within_s=60)
                assert len(s.peers["a"].reports) - steps >= 0.8 * (trio.current_time() - began) / 0.1
                assert not any("x" in s.peers[name].node.links.live for name in "abc")
                nursery.cancel_scope.cancel()

    run_virtual(main)


# --- what a heartbeat may claim ------------------------------------------------------------------------------------


def test_an_echo_of_the_future_gives_no_round_trip() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, _, link, other):
            await trio.sleep(5)
            known = other.flow.rtt_s
            for echo_s, held_s in ((trio.current_time() + 1e6, 0.0), (trio.current_time(), 1e6)):
                link.make_beat(
                    lambda *times, e=echo_s, h=held_s: msgspec.structs.replace(
                        BEAT, sent_s=times[0], echo_s=e, held_s=h
                    )
                )
                await trio.sleep(0.1)
            assert other.flow.rtt_s == pytest.approx(known, rel=0.5)
            assert not other.lost.is_set()

    run_virtual(main)


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
