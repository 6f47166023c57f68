"""What peers tell of themselves: a round's progress as text, also in heartbeats; strikes and relayed links."""

from __future__ import annotations

import json

import pytest
import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.links import limits
from p2ptrain.protocol.links.limits import Struck
from p2ptrain.protocol.membership.status import list_members, parse_relayed, parse_strikes
from tests.protocol.swarm import RUN, TestPeer, common, run_virtual, start_all, swarm


class Listener(trio.abc.Instrument):
    """Notes each status of a peer, whenever any task has done a step."""

    def __init__(self, peer: TestPeer) -> None:
        self.heard: list[str] = []
        self._peer = peer

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        status = self._peer.node.status
        if self.heard[-1:] != [status]:
            self.heard.append(status)


def test_a_round_is_told_from_its_call_to_its_landing() -> None:
    async def main() -> None:
        async with swarm(RUN, bandwidth_bytes_s=1e6, seed=3) as peers:
            first = peers.start("a", founder=True)
            second = peers.start("b")
            listener = Listener(second)
            trio.lowlevel.add_instrument(listener)
            with trio.fail_after(600):
                while not [event for event in second.rounds("committed") if event["group_size"] == 2]:
                    await trio.sleep(0.1)
                while not any(other.status == "training" and other.round for other in first.node.others):
                    await trio.sleep(0.1)
            trio.lowlevel.remove_instrument(listener)
            (other,) = first.node.others
            assert (other.peer_id, other.speed > 0, other.rtt_s >= 0) == ("b", True, True)

        told = [status.partition(": ")[2] for status in listener.heard if status.startswith("round ")]
        begins = told.index("gathering")
        # "agreeing" is between the last two where the others' word is waited for.
        steps = [status for status in told[begins:] if "/" not in status and status != "agreeing"]
        assert steps[:4] == ["gathering", "averaging", "fetching the mean", "landing"]
        sent = [status for status in told if status.startswith("sending ")]
        total = sent[0].partition("/")[2]
        assert sent[0] == f"sending 0/{total}"
        assert listener.heard[0] == "joining"
        assert "training" in listener.heard

    run_virtual(main)


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
