"""An invalid value, a broken member or a liar costs its own part in a round, never the round.

Real nodes in virtual time; "x" is a member that sends what a test wants.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from blake3 import blake3

from p2ptrain.algorithms.codec import CHUNK_BLOCKS, codec
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.rounds.deciding.events import Learned, Tick
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.deciding.timeouts import REPORT_S
from p2ptrain.protocol.rounds.driver import MAX_DEFERRED
from p2ptrain.protocol.rounds.moving import collection
from p2ptrain.protocol.rounds.moving.collection import EarlyChunks
from p2ptrain.protocol.rounds.moving.member import Sender
from p2ptrain.protocol.rounds.rotation import LeaderRotation
from p2ptrain.protocol.wire.messages import (
    KIND_OF,
    MAX_PEER_ID,
    Abort,
    Answer,
    Arrived,
    Attempt,
    Beat,
    Call,
    Contribution,
    Head,
    Hello,
    Join,
    Message,
    Part,
    Reduce,
    Reduced,
    Request,
    Roster,
    RosterPart,
    Withdraw,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.deciding.test_policy import arrived_of
from tests.protocol.signing import signed_by
from tests.protocol.swarm import RUN, Swarm, TestPeer, after, common, run_virtual, start_all, swarm
from tests.protocol.wiring import Endpoint, chunk_message

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)


def landed(s: Swarm, since_s: float, rounds: int, names: str = "abc") -> bool:
    """Whether these peers have each contributed to so many rounds since then."""
    return all(sum(r["t"] > since_s and not r["late"] for r in s.peers[n].rounds("committed")) >= rounds for n in names)


def skips(s: Swarm) -> list[dict[str, Any]]:
    return [r for p in s.peers.values() for r in p.rounds("skipped")]


# --- a peer of our own that has a problem ---------------------------------------------------------------------------


def spoil(peer: TestPeer) -> None:
    peer.tensors[0][0, 0] = float("nan")


def test_who_has_nan_in_its_weights_sits_the_round_out_says_why_and_comes_back() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 1, 4))
            spoiled, ill = trio.current_time(), s.peers["d"]
            spoil(ill)
            await s.until(lambda: any(r["t"] > spoiled and r["late"] for r in ill.rounds()))
            (missed, *_) = [r for r in ill.rounds() if r["t"] > spoiled and r["late"]]
            assert "not finite" in missed["reason"]
            others = [r for r in s.peers["a"].rounds() if r["round"] == missed["round"]]
            assert [r["contributors"] for r in others] == [["a", "b", "c"]]
            assert not skips(s)
            ill.tensors[0][0, 0] = 0.0
            cured = trio.current_time()
            await s.until(lambda: after(s, cured, 4), within_s=60)

    run_virtual(main)


@pytest.mark.parametrize("codec_name", ["none", "int8", "topk"])
def test_huge_finite_weights_stay_out_of_the_anchor_and_rounds_go_on(codec_name: str) -> None:
    """The largest float32 in a row of "c", put back after every step: the mean stays finite, the outer step not."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, round_codec=codec_name)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            diverged, ill = trio.current_time(), s.peers["c"]
            for _ in range(150):
                ill.tensors[0][0] = 3.4e38
                await trio.sleep(0.1)
            assert any("1e+12 from the anchor" in r["reason"] for r in ill.rounds() if r["t"] > diverged)
            # Once at most: the attempt at which it found out.
            assert landed(s, diverged, 4, "ab")
            for peer in s.peers.values():
                state = peer.node.state
                assert all(np.abs(vector).max() < 1e3 for vector in state.vectors)
            ill.tensors[0][0] = 0.0
            cured = trio.current_time()
            await s.until(lambda: after(s, cured, 3), within_s=60)

    run_virtual(main)


def test_a_lone_founder_with_nan_skips_rounds_and_commits_again_once_it_is_cured() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            founder = s.start("a", founder=True)
            await s.until(lambda: bool(founder.rounds("solo")))
            spoil(founder)
            await s.until(lambda: bool(founder.rounds("skipped")))
            assert founder.error is None
            founder.tensors[0][0, 0] = 0.0
            count = len(founder.rounds("solo"))
            await s.until(lambda: len(founder.rounds("solo")) >= count + 2, within_s=60)

    run_virtual(main)


@pytest.mark.parametrize("tokens", [-1, 2**53 + 1, 2**70, "8", float("nan")])
def test_our_own_join_with_an_impossible_claim_costs_only_us_the_attempt(tokens: Any) -> None:
    """`Peer.shard_tokens` refuses such values; here they stand for any bug of ours in a Join."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            began, ill = trio.current_time(), s.peers["c"]
            ill.exchange.shard_tokens = tokens
            await s.until(lambda: landed(s, began, 5, "ab"), within_s=60)
            assert not skips(s)
            assert not any(peer.node.links.strikes for peer in s.peers.values())
            ill.exchange.shard_tokens = 0
            cured = trio.current_time()
            await s.until(lambda: after(s, cured, 3), within_s=60)

    run_virtual(main)


def test_an_attempt_whose_join_cannot_be_sent_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            ill, send, broken = s.peers["c"], Link.send, True
            unsent: list[float] = []

            def sends(link: Link, message: Message) -> None:
                if broken and isinstance(message, Join) and message.incarnation.startswith("c."):
                    unsent.append(trio.current_time())
                    raise ValueError("a Join that cannot be packed")
                send(link, message)

            monkeypatch.setattr(Link, "send", sends)
            await s.until(lambda: bool(unsent))
            await trio.sleep(0)
            assert ill.node.driver.round_state.member is None
            began = trio.current_time()
            await s.until(lambda: landed(s, began, 2, "ab"), within_s=60)
            broken = False
            cured = trio.current_time()
            await s.until(lambda: after(s, cured, 3), within_s=60)

    run_virtual(main)


def test_a_member_whose_chunks_do_not_decode_is_left_out_and_struck() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 1, 4))
            taker = s.peers["d"].node.driver._taker
            encode = taker.encode

            async def encode_nonsense(*args: Any) -> None:
                await encode(*args)
                assert taker.own is not None
                chunks = taker.own.chunks
                chunks.update({start: b"\xff" * len(data) for start, data in chunks.items()})

            taker.encode = encode_nonsense  # type: ignore[method-assign]
            began = trio.current_time()
            await s.until(lambda: landed(s, began, 2), within_s=60)
            assert not any(p.rounds("skipped") for n, p in s.peers.items() if n != "d")
            assert all("d" not in r["contributors"] for r in s.peers["a"].rounds() if r["t"] > began)
            assert any(s.peers[name].node.links.strikes.get("d") for name in "abc")

    run_virtual(main)


def test_a_member_that_withdraws_and_reduces_nothing_is_left_out_of_the_same_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcd")  # of whom three average the three chunks
            await s.until(lambda: common(s, 1, 4))
            send, withdrawn, aborted = Sender.send, [], []

            async def send_unless(self: Sender) -> None:
                own, reducers = self._context.peer_id, {part.reducer for part in self._roster.parts}
                if own not in reducers and not withdrawn:
                    withdrawn.append(own)
                    raise RoundFailedError("not today")
                await send(self)

            def note(source: str, target: str, packet: bytes) -> PacketFault:
                if packet[1] == KIND_OF[Abort]:
                    aborted.append(source)
                return PacketFault.NONE

            monkeypatch.setattr(Sender, "send", send_unless)
            s.network.fault = note
            began = trio.current_time()
            await s.until(lambda: bool(withdrawn) and len(s.peers["a"].rounds()) and after(s, began, 3), within_s=30)
            first = min((r for r in s.peers["a"].rounds() if r["t"] > began), key=lambda r: r["t"])
            assert set(first["contributors"]) == set("abcd") - set(withdrawn)
            assert not aborted

    run_virtual(main)


def test_an_old_attempt_that_waits_for_a_worker_ends_only_itself() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            driver = s.peers["b"].node.driver
            taker = driver._taker
            take, waiting, go_on = taker.take, trio.Event(), trio.Event()

            async def fail_late(window_s: float) -> Any:
                taker.take = take  # type: ignore[method-assign]
                waiting.set()
                with trio.CancelScope(shield=True):  # as a worker thread is waited for
                    await go_on.wait()
                raise RoundFailedError("the old attempt fails, late")

            taker.take = fail_late  # type: ignore[method-assign]
            await waiting.wait()
            old = driver.round_state.member
            assert old is not None
            head = driver.head
            higher = Attempt(old.attempt.counter + 1, "c", s.peers["c"].node.incarnation)
            driver.deliver("c", Call(head.lineage, head.round + 1, higher, 0.5))
            go_on.set()
            await trio.sleep(0.01)
            assert driver.round_state.member is not None
            assert driver.round_state.member.attempt == higher
            assert driver._attempts._member is not None
            assert driver._attempts._member.attempt == higher

    run_virtual(main)


def test_a_strangers_call_to_one_peer_does_not_change_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a counter of its own that peer would wait for another leader than the others, until all have asked again."""
    monkeypatch.setattr(LeaderRotation, "is_out_of_turn", lambda *_: False)  # as some seconds after they are due

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            async with member(s) as x:
                for name in "abc" * 2:
                    x.links.live[name].send(x.call(900))
                    driver = s.peers[name].node.driver
                    await s.until(lambda d=driver: d.round_state.highest == 900, within_s=1)
                    assert driver._rotation.counter < 9
                    await s.until(lambda last=x.head.round: x.head.round > last)

    run_virtual(main)


# --- a joiner that hangs --------------------------------------------------------------------------------------------


def test_a_joiner_that_hangs_holds_a_lone_founder_up_for_half_a_minute_only() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            founder = s.start("a", founder=True)
            await s.until(lambda: len(founder.rounds("solo")) >= 2)
            async with member(s, stands=False):
                began = trio.current_time()
                await trio.sleep(25)
                assert not [r for r in founder.rounds() if r["t"] > began + 5]
                await s.until(lambda: len([r for r in founder.rounds() if r["t"] > began + 5]) >= 3, within_s=40)

    run_virtual(main)


# --- a member that says what it likes -------------------------------------------------------------------------------


@dataclass
class Member(Endpoint):
    """ "x", linked to everybody. It stands where the others do, and answers every message as a test wants it."""

    swarm: Swarm = field(default=None)  # type: ignore[assignment]
    stands: bool = True
    answer: Callable[[Message], Message | None] = lambda message: None

    @property
    def head(self) -> Head:
        return next(iter(self.swarm.peers.values())).node.driver.head

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None:
        await super().on_message(link, message, payload)
        answer = self.answer(message)
        if answer is not None:
            link.send(answer)

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        head = self.head
        lineage = head.lineage if self.stands else ""
        return Beat(
            sent_s, echo_s, held_s, head.genesis, lineage, head.round, head.tokens_total, 0, "", 10.0, (), 64
        )  # fmt: skip

    def tell(self, message: Message) -> None:
        for link in self.links.live.values():
            link.send(message)

    def call(self, counter: int, window_s: float = 0.5) -> Call:
        return Call(self.head.lineage, self.head.round + 1, Attempt(counter, "x", "x.1"), window_s)

    def join(self, call: Call, **fields: Any) -> Join:
        join = Join(
            call.lineage, call.round, call.attempt, "x.1", self.head.state_hash, True, 100, 0, 20, 10.0, 1e300,
            tuple(self.swarm.peers), False, None, None, None,
        )  # fmt: skip
        return msgspec.structs.replace(join, **fields)


@asynccontextmanager
async def member(s: Swarm, *, stands: bool = True) -> AsyncIterator[Member]:
    """x, its links kept up."""
    hello = Hello(s.run.run_id, s.run.digest, "x.1", "trainer", ("/memory/x",), b"")

    async def keep_linked() -> None:
        while True:
            for name in s.peers:
                with contextlib.suppress(PeerLostError):
                    await x.links.connect(name, [])
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        x = Member("x", nursery, swarm=s, stands=stands)
        x.links = Links(s.network.transport("x"), lambda: hello, x)
        await nursery.start(x.links.run)
        nursery.start_soon(keep_linked)
        await s.until(lambda: len(x.links.live) == len(s.peers))
        yield x
        nursery.cancel_scope.cancel()


def three_and_x(test: Callable[[Swarm, Member], Any], *, run: RunConfig = PLAIN) -> None:
    """Run a test with three peers that have committed a round together, and x."""

    async def main() -> None:
        async with swarm(run) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            async with member(s) as x:
                await trio.sleep(1.5)  # a beat, so that x counts as a trainer
                await test(s, x)
            s.check()
            assert len({p.node.driver.head.lineage for p in s.peers.values()}) == 1

    run_virtual(main)


def test_a_leader_that_falls_silent_after_its_call_delays_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaderRotation, "is_out_of_turn", lambda *_: False)  # as some seconds after they are due

    async def test(s: Swarm, x: Member) -> None:
        began, promised = trio.current_time(), x.head.round
        x.tell(x.call(7, window_s=1e9))
        await trio.sleep(0.5)
        if x.head.round == promised:
            assert any(p.node.driver.round_state.acceptor.promised.leader == "x" for p in s.peers.values())
        await s.until(lambda: landed(s, began, 3), within_s=60)

    three_and_x(test)


@pytest.mark.parametrize("says", ["nothing", "roster", "nonsense"])
def test_a_leader_that_calls_again_and_again_and_never_comes_to_an_end_is_not_followed_any_more(says: str) -> None:
    async def test(s: Swarm, x: Member) -> None:
        began = trio.current_time()

        async def call_forever() -> None:
            while True:
                counter = 1 + max(p.node.driver.round_state.acceptor.promised.counter for p in s.peers.values())
                call = x.call(counter, window_s=1e9)
                x.tell(call)
                if says != "nothing":
                    whole = RosterPart(0, s.peers["a"].node.state.num_blocks, "x", ())
                    parts = (whole,) if says == "roster" else ()
                    x.tell(Roster(call.lineage, call.round, call.attempt, (*s.peers, "x"), parts, ()))
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_forever)
            await s.until(lambda: landed(s, began, 5), within_s=300)
            nursery.cancel_scope.cancel()

    three_and_x(test)


@pytest.mark.parametrize("says", ["abort", "roster of others", "roster without them"])
def test_a_leader_whose_attempts_come_to_nothing_gets_no_new_chance_from_the_rounds_of_others(says: str) -> None:
    async def test(s: Swarm, x: Member) -> None:
        began = trio.current_time()

        async def call_forever() -> None:
            while True:
                call = x.call(1 + max(p.node.driver.round_state.highest for p in s.peers.values()), window_s=0.3)
                x.tell(call)
                await trio.sleep(0.3)
                if says == "abort":
                    x.tell(Abort(call.lineage, call.round, call.attempt, "sorry"))
                else:
                    members = tuple(s.peers) if says == "roster of others" else ("x",)
                    parts = (RosterPart(0, s.peers["a"].node.state.num_blocks, members[0], ()),)
                    x.tell(Roster(call.lineage, call.round, call.attempt, members, parts, ()))
                await trio.sleep(0.2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_forever)
            await s.until(lambda: landed(s, began, 15), within_s=100)
            nursery.cancel_scope.cancel()
        assert len(skips(s)) <= 3 * 2  # two rounds at most, of each of three peers

    three_and_x(test)


@pytest.mark.parametrize("counter", [2**63 - 1, 2**40, -5])
def test_a_counter_without_measure_is_not_believed(counter: int) -> None:
    async def test(s: Swarm, x: Member) -> None:
        began = trio.current_time()
        for _ in range(20):
            x.tell(x.call(counter))
            await trio.sleep(0.3)
        await s.until(lambda: landed(s, began, 4), within_s=40)
        assert all(p.node.driver.round_state.highest < 2**20 for p in s.peers.values())

    three_and_x(test)


def test_a_silent_reducer_with_an_incredible_rate_costs_each_leader_an_attempt() -> None:
    async def test(s: Swarm, x: Member) -> None:
        x.answer = lambda message: x.join(message) if isinstance(message, Call) else None
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 5), within_s=200)
        rosters = [message for message in x.of(Roster) if isinstance(message, Roster)]
        assert any(part.reducer == "x" for roster in rosters for part in roster.parts)
        assert all(part.reducer != "x" for part in rosters[-1].parts)
        assert len(x.links.live) == 3

    three_and_x(test)


@pytest.mark.parametrize("says", ["withdraws", "received from nobody"])
def test_a_reducer_that_makes_attempts_fail_is_avoided_in_the_next(says: str) -> None:
    async def test(s: Swarm, x: Member) -> None:
        asked = 0

        def answer(message: Message) -> Message | None:
            nonlocal asked
            match message:
                case Call():
                    return x.join(message)
                case Roster(lineage, round_, attempt, members, parts):
                    part = next((i for i, part in enumerate(parts) if part.reducer == "x"), None)
                    asked += part is not None
                    if says == "withdraws":
                        return Withdraw(lineage, round_, attempt, "no memory")
                    if part is not None:
                        return Arrived(lineage, round_, attempt, part, (), members, (), ())
            return None

        x.answer = answer
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 5), within_s=90)
        assert 1 <= asked <= 3  # once for each leader

    three_and_x(test)


def test_a_reducer_that_never_averages_and_reports_on_costs_each_leader_an_attempt() -> None:
    async def test(s: Swarm, x: Member) -> None:
        asked: list[str] = []

        def answer(message: Message) -> Message | None:
            match message:
                case Call():
                    return x.join(message)
                case Roster(lineage, round_, attempt, members, parts):
                    part = next((i for i, part in enumerate(parts) if part.reducer == "x"), -1)
                    if part >= 0:
                        asked.append(attempt.leader)
                        arrived = arrived_of(attempt, part, members, root=b"")
                        report = msgspec.structs.replace(arrived, lineage=lineage, round=round_)
                        s._nursery.start_soon(report_forever, attempt.leader, report)
            return None

        async def report_forever(leader: str, report: Message) -> None:
            while link := x.links.live.get(leader):
                link.send(report)
                await trio.sleep(REPORT_S)

        x.answer = answer
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 5), within_s=200)
        assert 1 <= len(asked) == len(set(asked)) <= 3

    # Without audits, so that x needs no roots of the others.
    three_and_x(test, run=dataclasses.replace(PLAIN, audit_rate=0.0, round_timeout_s=30.0))


@pytest.mark.parametrize("digests", [(), ("0" * 64, "1" * 64), ("0" * (MAX_PEER_ID + 1),)])
def test_a_report_with_another_number_of_hashes_is_a_strike_of_its_sender(digests: tuple[str, ...]) -> None:
    async def test(s: Swarm, x: Member) -> None:
        part, reports = 0, 0

        def answer(message: Message) -> Message | None:
            nonlocal part, reports
            match message:
                case Call():
                    return x.join(message)
                case Roster(lineage, round_, attempt, members, parts):
                    part = next((i for i, part in enumerate(parts) if part.reducer == "x"), -1)
                    arrived = arrived_of(attempt, part, members, root=b"")
                    return msgspec.structs.replace(arrived, lineage=lineage, round=round_) if part >= 0 else None
                case Reduce(lineage, round_, attempt):
                    reports += 1
                    return Reduced(lineage, round_, attempt, part, digests, (), False)
            return None

        x.answer = answer
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 3), within_s=90)
        assert reports
        assert sum(p.node.links.strikes.get("x", 0) for p in s.peers.values()) == reports

    # Without audits, so that x needs no roots of the others.
    three_and_x(test, run=dataclasses.replace(PLAIN, audit_rate=0.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": -1}, {"run_step": -(2**62)}, {"rate": -1.0}, {"speed": -1.0}, {"speed": 1.7e308},
        {"incarnation": "x" * (MAX_PEER_ID + 1)},  # leaders send it on
    ],
)  # fmt: skip
def test_a_join_with_an_impossible_claim_is_refused_and_the_round_goes_on(fields: dict[str, Any]) -> None:
    async def test(s: Swarm, x: Member) -> None:
        x.answer = lambda message: x.join(message, **fields) if isinstance(message, Call) else None
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 2), within_s=40)
        assert not skips(s)
        strikes = [p.node.links.strikes for p in s.peers.values()]
        assert any(strikes)
        assert not any(set(of) - {"x"} for of in strikes)

    three_and_x(test)


def test_a_commit_counts_only_with_the_signatures_of_the_voters() -> None:
    """A record of x's own, whose parts it serves: all that a peer needs to take its step, but for the voters."""

    async def test(s: Swarm, x: Member) -> None:
        blocks = s.peers["a"].node.state.num_blocks
        mean = b"".join(
            codec("int8").encode(np.ones((min(CHUNK_BLOCKS, blocks - start), 64), np.float32))
            for start in range(0, blocks, CHUNK_BLOCKS)
        )
        digest = blake3(mean).hexdigest()

        async def serve(link: Link, request: Request) -> None:
            piece = mean[request.index * 128 * 1024 :][: 128 * 1024] if request.subject == digest else b""
            await link.send_bulk(Answer(request.request, bool(piece), "part"), piece, Traffic.ROUND)

        x.on_request = serve
        began = trio.current_time()
        for _ in range(30):
            head = x.head
            assert head.record is not None
            forged = msgspec.structs.replace(
                head.record, round=head.round + 1, parent_hash=head.state_hash, tokens_total=2**50,
                parts=(Part(0, blocks, digest, "x"),),
            )  # fmt: skip
            x.tell(signed_by("x", forged, s.run.digest))
            await trio.sleep(0.5)
        await s.until(lambda: landed(s, began, 4), within_s=60)
        assert all(p.node.driver.head.tokens_total < 2**40 for p in s.peers.values())
        assert all(p.node.state.hashes.state == p.node.driver.head.state_hash for p in s.peers.values())

    three_and_x(test)


def test_the_leader_of_the_attempt_that_was_decided_is_forgiven_and_not_that_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """x called over the attempt of a when most were READY."""

    async def test(s: Swarm, x: Member) -> None:
        driver = s.peers["b"].node.driver
        attempts, commit, now = driver._attempts, driver.head.commit, trio.current_time()
        assert commit is not None
        monkeypatch.setattr(driver.committer, "apply", lambda commit: None)
        for name in "ax":
            driver._rotation._backoff.note(name, now, 60.0)
        attempts._take_part(x.call(99).attempt, 1.0)
        decided = msgspec.structs.replace(commit, attempt=Attempt(98, "a", s.peers["a"].node.incarnation))
        attempts._carry_out(Learned(decided), Tick())
        assert driver._rotation._backoff.backed_off(now) == ["x"]

    three_and_x(test)


def test_a_roster_that_is_read_together_with_the_end_of_its_attempt_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next round would wait for means that nobody pushes any more."""

    async def test(s: Swarm, x: Member) -> None:
        driver = s.peers["b"].node.driver
        attempts, pushed = driver._attempts, driver.context.pushed
        monkeypatch.setattr(attempts, "apply", lambda event: None)
        await s.until(lambda: not driver.committer.resolving)
        attempts._take_part(x.call(99).attempt, 1.0)
        await trio.sleep(0.3)
        member = attempts._member
        assert member is not None
        part = RosterPart(0, s.peers["b"].node.state.num_blocks, "x", ())
        roster = Roster(x.head.lineage, x.head.round + 1, member.attempt, ("b", "x"), (part,), ())
        member.deliver(roster)
        attempts._end_member()
        driver.context.parts.end_attempt()
        await trio.sleep(0.1)
        assert not pushed._pushed
        # The same where a peer gives its attempts up.
        pushed.begin_attempt(roster)
        attempts.give_up("a test")
        assert not pushed._pushed

    three_and_x(test)


def test_a_stranger_replaces_no_call_that_waits_for_an_outcome_to_land() -> None:
    async def test(s: Swarm, x: Member) -> None:
        driver = s.peers["a"].node.driver
        while driver.committer.resolving:
            await trio.sleep(0.1)
        call = x.call(5)
        driver.committer.resolving = True
        driver.deliver("b", call)
        for i in range(200):
            driver.deliver(f"stranger {i}", call)
        held, driver.committer.resolving = dict(driver._deferred), False
        assert ("b", Call) in held
        assert len(held) == MAX_DEFERRED
        driver._deferred.clear()

    three_and_x(test)


@pytest.mark.parametrize("error", [WireError("off the plan"), KeyError("a bug")])
def test_a_deferred_message_that_fails_closes_the_link_of_its_sender(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(s: Swarm, x: Member) -> None:
        node = s.peers["a"].node
        driver, link = node.driver, node.links.live["x"]
        while driver.committer.resolving:
            await trio.sleep(0.1)
        driver.committer.resolving = True
        driver.deliver("x", x.call(5))
        driver.committer.resolving = False

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(driver._attempts, "receive", fail)
            driver.resolved()
        assert link.lost.is_set()
        assert node.links.strikes.get("x", 0) == isinstance(error, WireError)
        tracebacks = [record for record in caplog.records if record.exc_info]
        assert len(tracebacks) == isinstance(error, KeyError)

    three_and_x(test)


# --- chunks that come before the roster -----------------------------------------------------------------------------

INT8, BLOCKS = codec("int8"), 4 * CHUNK_BLOCKS
CHUNK = INT8.encode(np.zeros((CHUNK_BLOCKS, 64), np.float32))


def test_early_chunks_take_two_encoded_models_at_most_and_one_of_each_sender() -> None:
    early = EarlyChunks(INT8, Grid(0, BLOCKS))
    for sender in "abcde":
        for _ in range(3):
            for start in range(0, BLOCKS, CHUNK_BLOCKS):
                early.add(sender, chunk_message(start, start + CHUNK_BLOCKS), CHUNK)
    assert early.overrun == {"c", "d", "e"}
    kept = list(early.take())
    assert [sender for sender, *_ in kept] == ["a"] * 4 + ["b"] * 4
    assert sum(len(data) for *_, data in kept) == 2 * INT8.size_bytes(BLOCKS)
    assert not list(early.take())


@pytest.mark.parametrize(
    ("start", "stop", "data"),
    [
        (0, CHUNK_BLOCKS, CHUNK[:-1]),
        (0, CHUNK_BLOCKS, b"\xff" * len(CHUNK)),
        (1, CHUNK_BLOCKS + 1, CHUNK),
        (0, 2 * CHUNK_BLOCKS, CHUNK * 2),
        (BLOCKS, BLOCKS + CHUNK_BLOCKS, CHUNK),
        (-CHUNK_BLOCKS, 0, CHUNK),
    ],
)
def test_an_early_chunk_that_no_roster_can_want_is_refused(start: int, stop: int, data: bytes) -> None:
    early = EarlyChunks(INT8, Grid(0, BLOCKS))
    with pytest.raises(WireError):
        early.add("a", chunk_message(start, stop), data)
    assert not list(early.take())


def test_early_chunks_that_are_dropped_anyway_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    early, checked = EarlyChunks(INT8, Grid(0, BLOCKS)), 0

    def check(*_: object) -> None:
        nonlocal checked
        checked += 1

    monkeypatch.setattr(collection, "check_bytes", check)
    for _ in range(3):
        early.add("a", chunk_message(0, CHUNK_BLOCKS), CHUNK)
    early.overrun.add("b")
    early.add("b", chunk_message(0, CHUNK_BLOCKS), CHUNK)
    assert checked == 1


def test_chunks_that_come_before_the_roster_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roster of one member is late: what the others send it meanwhile is averaged all the same."""

    async def main() -> None:
        async with swarm(PLAIN, latency_s=0.01) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            early: list[str] = []
            take = EarlyChunks.take

            def note(self: EarlyChunks):  # type: ignore[no-untyped-def]
                for chunk in take(self):
                    early.append(chunk[0])
                    yield chunk

            monkeypatch.setattr(EarlyChunks, "take", note)
            deliver = s.peers["c"].node.driver.deliver

            def deliver_late(sender: str, message: Message, payload: bytes = b"") -> None:
                if isinstance(message, Roster):
                    s._nursery.start_soon(later, sender, message)
                else:
                    deliver(sender, message, payload)

            async def later(sender: str, message: Message) -> None:
                await trio.sleep(0.3)
                deliver(sender, message)

            s.peers["c"].node.driver.deliver = deliver_late  # type: ignore[method-assign]
            began = trio.current_time()
            await s.until(lambda: after(s, began, 3), within_s=30)
            assert set(early) >= {"a", "b"}

    run_virtual(main)


def test_a_chunk_of_no_attempt_of_ours_is_not_kept() -> None:
    async def test(s: Swarm, x: Member) -> None:
        message = Contribution(x.head.lineage, x.head.round + 1, Attempt(999, "x", "x.1"), 0, CHUNK_BLOCKS, b"", ())
        for _ in range(50):
            for link in x.links.live.values():
                await link.send_bulk(message, CHUNK, Traffic.ROUND)
        began = trio.current_time()
        await s.until(lambda: landed(s, began, 2), within_s=30)

    three_and_x(test)
