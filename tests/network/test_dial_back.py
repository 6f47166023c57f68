"""Dial-backs: requests, honest and hostile answers, and what a peer takes from several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    dial_back,
    majority,
    question,
    read_answer,
)
from p2ptrain.network.libp2p_pb2 import AutoNat
from p2ptrain.network.socket_stream import framed, receive_message
from p2ptrain.protocol.wire.transport import Refusal, no_refusal
from tests.network.local import Given, open_pair

REACHED, FAILED, UNKNOWN = DialBack
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
        ([], None),
        ([UNKNOWN, UNKNOWN], None),
        ([REACHED], REACHED),
        ([FAILED, UNKNOWN], FAILED),
        ([REACHED, FAILED], None),
        ([REACHED, FAILED, REACHED], REACHED),
        ([FAILED, REACHED, FAILED], FAILED),
    ],
)
def test_one_of_three_that_lies_decides_nothing(results: list[DialBack], decided: DialBack | None) -> None:
    assert majority(results) is decided


def asked(
    monkeypatch: pytest.MonkeyPatch, results: list[dict[str, DialBack]], refusal: Refusal = no_refusal
) -> Iterator[tuple[float, bool, set[str]]]:
    """For each round of results by peer: how long to wait, whether dial-backs failed, and who was asked."""
    now: dict[str, DialBack] = {}
    who: set[str] = set()

    async def public_peers(control_path: str, timeout_s: float) -> dict[str, str]:
        return dict.fromkeys(now, "/ip4/5.188.7.2/tcp/4001")

    async def answer(control_path: str, peer: str, me: str, maddrs: list[str]) -> tuple[DialBack, str]:
        assert (me, maddrs) == ("me", ["/ip4/5.188.7.1/tcp/4001"])
        who.add(peer)
        return now[peer], ""

    monkeypatch.setattr("p2ptrain.network.dial_back.public_peers", public_peers)
    monkeypatch.setattr("p2ptrain.network.dial_back.dial_back", answer)
    dial_backs = DialBacks("", "me", lambda: ["/ip4/5.188.7.1/tcp/4001"], refusal)
    for answers in results:
        now.clear()
        now.update(answers)
        who.clear()
        yield trio.run(dial_backs.ask), dial_backs.failed, set(who)


def test_peers_that_fail_are_believed_at_once_and_later_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[dict[str, DialBack]] = [
        {},
        {"a": UNKNOWN},
        {"a": FAILED},
        {"a": UNKNOWN},
        {"a": REACHED},
        {"a": FAILED},
        {"a": REACHED},
        {"a": FAILED},
        {"a": FAILED},
        {"a": FAILED},
    ]
    assert [(wait_s, failed) for wait_s, failed, _ in asked(monkeypatch, rounds)] == [
        (ASK_SOON_S, False),
        (ASK_SOON_S, False),
        (ASK_EVERY_S, True),
        (ASK_SOON_S, True),
        (ASK_EVERY_S, False),
        (ASK_SOON_S, False),
        (ASK_EVERY_S, False),
        (ASK_SOON_S, False),
        (ASK_EVERY_S, True),
        (ASK_EVERY_S, True),
    ]


def test_a_few_are_asked_and_none_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = dict.fromkeys("abcdef", REACHED)
    ((_, _, who),) = asked(monkeypatch, [peers])
    assert len(who) == MAX_ASKED
    ((_, _, who),) = asked(monkeypatch, [peers], lambda peer: None if peer == "b" else "denied")
    assert who == {"b"}


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
