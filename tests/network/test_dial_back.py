"""Dial-backs: requests, honest and hostile answers, and what a peer takes from several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    Reachability,
    decide,
    dial_back,
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
        ("4+ 6- 6-", REACHED),
        ("4- 6+", REACHED),
        ("4- 4+ 6-", FAILED),
    ],
)
def test_one_of_three_that_lies_decides_nothing(results: str, decided: DialBack) -> None:
    signs = {"+": REACHED, "-": FAILED, "?": UNKNOWN}
    assert decide([(f"ip{family}", signs[sign]) for family, sign in results.split()]) is decided


OWN = "/ip4/5.188.7.1/tcp/4001"
ELSEWHERE = {peer: f"/ip4/{host}.1.1.1/tcp/4001" for host, peer in enumerate("abcdef", start=11)}


def test_peers_of_other_networks_are_asked_and_one_of_each() -> None:
    relayed = f"/ip4/16.1.1.2/tcp/4001/p2p/{ID}/p2p-circuit"
    own = [OWN, "/ip4/192.168.1.5/tcp/4001", relayed]
    for _ in range(20):
        assert len(whom_to_ask(ELSEWHERE, own, ())) == MAX_ASKED
        assert "e" in whom_to_ask(ELSEWHERE, own, ("e",))
        assert "f" in whom_to_ask({"f": ELSEWHERE["f"]}, own, ())
        one_machine = {**ELSEWHERE, **{f"liar{number}": f"/ip4/9.9.9.9/tcp/{number}" for number in range(1, 200)}}
        assert sum(peer.startswith("liar") for peer in whom_to_ask(one_machine, own, ())) <= 1
    assert not whom_to_ask({"inside": "/ip4/5.188.200.2/tcp/4001"}, own, ("inside",))


def test_peers_are_asked_over_families_of_which_there_is_a_public_address() -> None:
    peers = {"four": "/ip4/9.9.9.9/tcp/1", "six": "/ip6/2001:4860:4860::8888/tcp/1", "name": "/dns4/example.org/tcp/1"}
    assert whom_to_ask(peers, [OWN, "/ip6/fd00::1/tcp/1"], ()) == {"four": "ip4"}
    assert whom_to_ask(peers, ["/ip4/10.0.0.1/tcp/1", "/ip6/2a00::1/tcp/1"], ()) == {"six": "ip6"}
    assert whom_to_ask(peers, [OWN, "/ip6/2a00::1/tcp/1"], ()) == {"four": "ip4", "six": "ip6"}


def asked(monkeypatch: pytest.MonkeyPatch, results: list[DialBack | None]) -> Iterator[tuple[float, DialBack]]:
    """How long to wait, and the verdict, when one peer answers so in turn; None: nobody is connected."""

    reachability = Reachability("", "me", lambda: [OWN], {"denied": "no"}.get, ())
    for result in results:
        peers = {} if result is None else {"a": ELSEWHERE["a"], "denied": ELSEWHERE["b"]}
        monkeypatch.setattr("p2ptrain.network.dial_back.public_peers", AsyncMock(return_value=peers))
        answer = AsyncMock(return_value=(result, ""))
        monkeypatch.setattr("p2ptrain.network.dial_back.dial_back", answer)
        yield trio.run(reachability.ask), reachability.verdict
        assert reachability.answered.is_set()
        assert answer.call_args_list == ([] if result is None else [call("", "a", "me", [OWN])])


def test_peers_that_fail_are_believed_at_once_and_later_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [None, UNKNOWN, FAILED, UNKNOWN, REACHED, FAILED, REACHED, FAILED, UNKNOWN, FAILED, FAILED]
    assert list(asked(monkeypatch, answers)) == [
        (ASK_SOON_S, UNKNOWN),
        (ASK_SOON_S, UNKNOWN),
        (ASK_EVERY_S, FAILED),
        (ASK_SOON_S, FAILED),
        (ASK_EVERY_S, REACHED),
        (ASK_SOON_S, REACHED),
        (ASK_EVERY_S, REACHED),
        (ASK_SOON_S, REACHED),
        (ASK_SOON_S, REACHED),
        (ASK_EVERY_S, FAILED),
        (ASK_EVERY_S, FAILED),
    ]


def test_the_first_that_reaches_us_is_told_before_others_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def public_peers(control_path: str, timeout_s: float) -> dict[str, str]:
        return {peer: ELSEWHERE[peer] for peer in "ab"}

    async def answer(control_path: str, peer: str, me: str, maddrs: list[str]) -> tuple[DialBack, str]:
        await trio.sleep(0.1 if peer == "a" else 20)
        return (REACHED if peer == "a" else FAILED), ""

    async def main() -> None:
        reachability = Reachability("", "me", lambda: [OWN], no_refusal, ())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reachability.ask)
            await reachability.answered.wait()
            assert trio.current_time() - began_s < 1
            assert reachability.verdict is UNKNOWN
        assert reachability.verdict is UNKNOWN

    clock = trio.testing.MockClock(autojump_threshold=0)
    began_s = clock.current_time()
    monkeypatch.setattr("p2ptrain.network.dial_back.public_peers", public_peers)
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
