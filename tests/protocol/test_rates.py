"""How many messages a peer may send, and what a heartbeat may claim: a flood costs the flooder its link."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.flow_control import ACK_EVERY_BYTES
from p2ptrain.protocol.links.limits import (
    ANSWER_BYTES,
    BEATS_PER_S,
    FRAGMENTS_PER_S,
    MAX_GONE,
    UNITS_PER_S,
    MessageRates,
    PeerRates,
)
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link
from p2ptrain.protocol.wire.messages import MAX_BEAT_MEMBERS, Ack, Beat, Due, Fragment, Message, Request, pack, unpack
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.test_rounds import common, start_all
from tests.protocol.wiring import endpoints, linked_pair, until

BEAT = Beat(1.0, 0.0, 0.0, "0-g", "0-l", 3, 70, 7, "training", 2.0, (), 1)
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


def test_answers_that_nobody_asked_for_are_bounded() -> None:
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
                head, steps = s.peers["a"].node.engine.head.round, len(s.peers["a"].reports)
                began = trio.current_time()
                await s.until(lambda: all(s.peers[n].node.engine.head.round >= head + 5 for n in "abc"), within_s=60)
                assert len(s.peers["a"].reports) - steps >= 0.8 * (trio.current_time() - began) / 0.1
                assert not any("x" in s.peers[name].node.links.live for name in "abc")
                nursery.cancel_scope.cancel()

    run_virtual(main)


# --- what a heartbeat may claim ------------------------------------------------------------------------------------

IMPOSSIBLE: list[dict[str, Any]] = [
    {"sent_s": -1.0}, {"sent_s": 1e13}, {"echo_s": -1.0}, {"held_s": -0.1}, {"held_s": 1e300},
    {"genesis": "x-y"}, {"genesis": "g"}, {"lineage": "x-y"}, {"lineage": "1-"}, {"lineage": "1-a\n"},
    {"lineage": "1-" + 65 * "a"}, {"lineage": "1234567890-a"}, {"lineage": "1-é"}, {"lineage": "1-\x1b"},
    {"round": -2}, {"round": 2**62 + 1}, {"round": 2**63 - 1}, {"tokens_total": -1}, {"tokens_total": 2**62 + 1},
    {"step": -1}, {"step": 2**63 - 1}, {"status": 257 * "x"}, {"speed": -1.0}, {"speed": 1.1e6}, {"speed": 1e308},
    {"reach": -1}, {"reach": 65}, {"members": (("x", ()),) * (MAX_BEAT_MEMBERS + 1)}, {"members": ((129 * "x", ()),)},
    {"members": (("x", ("a",) * 17),)}, {"members": (("x", (513 * "a",)),)},
]  # fmt: skip


@pytest.mark.parametrize("lie", IMPOSSIBLE, ids=lambda lie: f"{next(iter(lie))} {str(next(iter(lie.values())))[:12]!r}")
def test_a_heartbeat_that_nobody_can_send_is_refused(lie: dict[str, Any]) -> None:
    fields = [lie.get(name, getattr(BEAT, name)) for name in Beat.__struct_fields__]
    with pytest.raises(WireError):
        unpack(Beat, msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("field", ["sent_s", "echo_s", "held_s", "speed"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_heartbeat_with_a_number_that_is_not_finite_is_refused(field: str, value: float) -> None:
    packed = msgpack.packb([*msgspec.structs.astuple(msgspec.structs.replace(BEAT, **{field: value}))])
    with pytest.raises(WireError):
        unpack(Beat, packed)


def test_a_heartbeat_at_its_limits_is_taken() -> None:
    most = Beat(
        1e12, 1e12, 1e12, "999999999-" + 64 * "z", "0-a", 2**62, 2**62, 2**62, 256 * "x", 1e6,
        ((128 * "x", (512 * "a",) * 16),) * MAX_BEAT_MEMBERS, 64,
    )  # fmt: skip
    assert unpack(Beat, pack(most)) == most
    assert unpack(Beat, pack(least := Beat(0.0, 0.0, 0.0, "", "", -1, 0, 0, "", 0.0, (), 0))) == least


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
