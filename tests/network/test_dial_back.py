"""Dial-backs: requests, honest and hostile answers, and what a peer takes from several of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, call

import pytest
import trio
import trio.testing

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.dial_back import (
    ASK_EVERY_S,
    ASK_SOON_S,
    MAX_ASKED,
    DialBack,
    DialBacks,
    Standing,
    dial_back,
    majority,
    question,
    read_answer,
    whom_to_ask,
)
from p2ptrain.network.libp2p_pb2 import AutoNat
from p2ptrain.network.socket_stream import framed, receive_message
from p2ptrain.protocol.wire.transport import no_refusal
from tests.network.local import Given, open_pair

REACHED, FAILED, UNKNOWN = DialBack
ID = "QmUSMyzY55Bey5YDUqZbiVHG2T37JZRZEqFnNkhpKewoEt"
ADDRESS = Multiaddr("/ip4/8.8.4.4/tcp/4001").to_bytes()


def _answer(status: int, text: bytes = b"", address: bytes = b"") -> bytes:
    """As go-libp2p writes it: type, then the response with its status, text and address."""
    status_field = b"\x08" + (bytes([status]) if status < 128 else bytes([status & 0x7F | 0x80, status >> 7]))
    response = status_field + (b"\x12" + bytes([len(text)]) + text if text else b"")
    response += b"\x1a" + bytes([len(address)]) + address if address else b""
    return b"\x08\x01\x1a" + bytes([len(response)]) + response


def test_the_question_is_a_message_of_the_protocol() -> None:
    assert framed(question(b"me", [b"there", b"here"])) == (
        b"\x17" b"\x08\x00" b"\x12\x13" b"\x0a\x11" b"\x0a\x02me" b"\x12\x05there" b"\x12\x04here"
    )  # fmt: skip


def read(message: bytes) -> tuple[DialBack, str]:
    """The result that a peer's bytes stand for."""
    stream = Given(bytes([len(message)]) + message)
    answer, _ = trio.run(receive_message, stream, AutoNat)
    return read_answer(answer)


def test_answers() -> None:
    assert read(_answer(0, address=ADDRESS)) == (DialBack.REACHED, "/ip4/8.8.4.4/tcp/4001")
    assert read(_answer(100, b"dial failed")) == (DialBack.FAILED, "dial failed")
    assert read(_answer(101, b"too many dials")) == (DialBack.UNKNOWN, "too many dials")
    assert read(_answer(300, b"\x1b[2Jx")) == (DialBack.UNKNOWN, "[2Jx")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x08\x01",
        b"\x08\x01\x1a\x7f",
        b"\xff" * 30,
        b"\x1a",
        b"\x18\x05",
        _answer(0),
        _answer(0, address=b"nonsense"),
        _answer(0, address=Multiaddr("/unix/\x1b[2J").to_bytes()),
        b"\x1a\x02\x10\x05",
    ],
)
def test_what_is_no_answer_is_refused(message: bytes) -> None:
    with pytest.raises((WireError, PeerLostError)):
        read(message)


@pytest.mark.parametrize(
    ("results", "decided"),
    [
        ("", UNKNOWN),
        ("4? 4?", UNKNOWN),
        ("4+", REACHED),
        ("4- 4?", FAILED),
        ("4+ 4-", UNKNOWN),
        ("4+ 4- 4+", REACHED),
        ("4- 4+ 4-", FAILED),
    ],
)
def test_one_of_three_that_lies_decides_nothing(results: str, decided: DialBack) -> None:
    assert majority(result for _, result in of(results)) is decided


def of(results: str) -> list[tuple[str, DialBack]]:
    """Results by address family, such as "4+ 6-"."""
    signs = {"+": REACHED, "-": FAILED, "?": UNKNOWN}
    return [(f"ip{family}", signs[sign]) for family, sign in results.split()]


OWN = "/ip4/5.188.7.1/tcp/4001"
ELSEWHERE = {peer: f"/ip4/{host}.1.1.1/tcp/4001" for host, peer in enumerate("abcdef", start=11)}


def test_peers_of_other_networks_are_asked_and_one_of_each() -> None:
    relayed = f"/ip4/16.1.1.2/tcp/4001/p2p/{ID}/p2p-circuit"
    own = [OWN, "/ip4/192.168.1.5/tcp/4001", relayed]
    rng = random.Random(0)
    for _ in range(20):
        assert len(whom_to_ask(ELSEWHERE, own, (), rng)) == MAX_ASKED
        assert "e" in whom_to_ask(ELSEWHERE, own, ("e",), rng)
        assert "f" in whom_to_ask({"f": ELSEWHERE["f"]}, own, (), rng)
        one_machine = {**ELSEWHERE, **{f"liar{number}": f"/ip4/9.9.9.9/tcp/{number}" for number in range(1, 200)}}
        assert sum(peer.startswith("liar") for peer in whom_to_ask(one_machine, own, (), rng)) <= 1
    assert not whom_to_ask({"inside": "/ip4/5.188.200.2/tcp/4001"}, own, ("inside",), rng)


def test_peers_are_asked_over_families_of_which_there_is_a_public_address() -> None:
    peers = {"four": "/ip4/9.9.9.9/tcp/1", "six": "/ip6/2001:4860:4860::8888/tcp/1", "name": "/dns4/example.org/tcp/1"}
    assert whom_to_ask(peers, [OWN, "/ip6/fd00::1/tcp/1"], (), random.Random(0)) == {"four": "ip4"}
    assert whom_to_ask(peers, ["/ip4/10.0.0.1/tcp/1", "/ip6/2a00::1/tcp/1"], (), random.Random(0)) == {"six": "ip6"}
    assert whom_to_ask(peers, [OWN, "/ip6/2a00::1/tcp/1"], (), random.Random(0)) == {"four": "ip4", "six": "ip6"}


def after(rounds: str) -> list[Standing]:
    """The standings after each of some rounds, such as "4+ 6- | 4-"."""
    return list(itertools.accumulate(map(of, rounds.split("|")), Standing.after, initial=Standing()))[1:]


def test_failures_are_believed_twice_and_relays_used_meanwhile() -> None:
    seen = [
        (standing.needs_relays, standing.verdicts.get("ip4", UNKNOWN), standing.is_settled)
        for standing in after(" | 4? | 4- | 4? | 4- | 4+ | 4- | 4+ | 4? | 4+ | 4- | 4+ | 4- | 4-")
    ]
    assert seen == [
        (False, UNKNOWN, False),
        (True, UNKNOWN, False),
        (True, UNKNOWN, False),
        (True, UNKNOWN, False),
        (True, FAILED, True),
        (True, FAILED, False),
        (True, FAILED, True),
        (True, FAILED, False),
        (True, FAILED, False),
        (False, REACHED, True),
        (False, REACHED, False),
        (False, REACHED, True),
        (False, REACHED, False),
        (True, FAILED, True),
    ]


def test_each_family_has_its_own_verdict() -> None:
    seen = [(s.needs_relays, s.is_shut) for s in after("4+ | 4+ 4+ 6- | 4+ 6- | 6- | 4- 6- | 4- 6- | 6+ | 6+")]
    assert seen == [
        (False, False),
        (False, False),
        (True, False),
        (True, False),
        (True, False),
        (True, True),
        (True, True),
        (True, False),
    ]


def test_one_that_reaches_us_is_enough_at_first_and_a_tie_is_not() -> None:
    assert [s.needs_relays for s in after("4+ 4- | 4+ 4- | 4+")] == [True, True, False]


def test_who_is_refused_is_not_asked_and_it_is_asked_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {"a": ELSEWHERE["a"], "denied": ELSEWHERE["b"]}
    answer = AsyncMock(return_value=(REACHED, ""))
    monkeypatch.setattr("p2ptrain.network.dial_back.public_peers", AsyncMock(side_effect=[{}, peers]))
    monkeypatch.setattr("p2ptrain.network.dial_back.dial_back", answer)
    dial_backs = DialBacks("", "me", lambda: [OWN], {"denied": "no"}.get, ())
    assert trio.run(dial_backs.ask) == ASK_SOON_S
    assert dial_backs.told.is_set()
    assert trio.run(dial_backs.ask) == ASK_EVERY_S
    assert answer.call_args_list == [call("", "a", "me", [OWN])]


def test_the_first_that_reaches_us_is_told_before_others_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(control_path: str, peer: str, me: str, maddrs: list[str]) -> tuple[DialBack, str]:
        await trio.sleep(0.1 if peer == "a" else 20)
        return (REACHED if peer == "a" else UNKNOWN), ""

    async def main() -> None:
        dial_backs = DialBacks("", "me", lambda: [OWN], no_refusal, ())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial_backs.ask)
            await trio.sleep(0.05)
            assert dial_backs.standing.needs_relays
            assert not dial_backs.told.is_set()
            await dial_backs.told.wait()
            assert trio.current_time() - began_s < 1
            assert not dial_backs.standing.needs_relays
        assert dial_backs.standing.verdicts == {"ip4": REACHED}

    clock = trio.testing.MockClock(autojump_threshold=0)
    began_s = clock.current_time()
    peers = {peer: ELSEWHERE[peer] for peer in "ab"}
    monkeypatch.setattr("p2ptrain.network.dial_back.public_peers", AsyncMock(return_value=peers))
    monkeypatch.setattr("p2ptrain.network.dial_back.dial_back", answer)
    trio.run(main, clock=clock)


def test_a_peer_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_stream(*args: object) -> object:
        return await trio.sleep_forever()

    monkeypatch.setattr("p2ptrain.network.dial_back.open_stream", open_stream)
    result, _ = trio.run(dial_back, "", "a", "b", [], clock=trio.testing.MockClock(autojump_threshold=0))
    assert result is UNKNOWN


@pytest.mark.processes
def test_a_real_peer_refuses_to_dial_an_address_that_is_not_public(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            control_path = second.transport.control_path
            result, detail = await dial_back(control_path, first.peer_id, second.peer_id, second.maddrs)
            assert result is DialBack.UNKNOWN
            assert "refusing to dial peer with blocked observed address" in detail

    run(main)
