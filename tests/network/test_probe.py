"""Dial-backs of a probe: requests, and the handling of honest and hostile answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.libp2p_pb2 import AutoNat
from p2ptrain.network.probe import DialBack, dial_back, question, read_answer
from p2ptrain.network.socket_stream import framed, receive_message
from tests.network.local import Given, open_pair

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


@pytest.mark.processes
def test_a_real_peer_refuses_to_dial_an_address_that_is_not_public(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            control_path = second.transport.control_path
            result, detail = await dial_back(control_path, first.peer_id, second.peer_id, second.maddrs)
            assert result is DialBack.UNKNOWN
            assert "refusing to dial peer with blocked observed address" in detail

    run(main)
