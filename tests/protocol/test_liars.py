"""Peers that lie about where they stand or what they accepted: nobody votes twice for them, and rounds go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.rounds import leader
from p2ptrain.protocol.rounds.round_state import Acceptor
from p2ptrain.protocol.wire.messages import Attempt, Beat, Commit, Contributor, Head, Join, Message, Record
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.test_rounds import common, start_all

PLAIN = dataclasses.replace(RUN, fragment_fraction=0.0)
Lie = dict[str, Any]


class LyingDonor:
    """Changes what a node says of its head, by `head`, and in its beats, by `beat`."""

    def __init__(self, node: Node) -> None:
        self.head: Callable[[Head], Lie] = lambda head: {}
        self.beat: Callable[[Beat], Lie] = lambda beat: {}
        self.asked = 0
        beat_of = node.make_beat
        node.make_beat = lambda *times: self._beat(beat_of(*times))  # type: ignore[method-assign]

        class Engine:
            committer = node.engine.committer
            head = property(lambda _: self._head(node.engine.head))

        node._server._state._engine = Engine()  # type: ignore[assignment]

    def _beat(self, beat: Beat) -> Beat:
        return msgspec.structs.replace(beat, **self.beat(beat))

    def _head(self, head: Head) -> Head:
        lie = self.head(head)
        self.asked += bool(lie)
        return msgspec.structs.replace(head, **lie)


def places_of(node: Node) -> list[tuple[str, int]]:
    """Where a node stands, and each place that it stands at from now on, in order."""
    set_head, places = node.engine.set_head, [(node.engine.head.lineage, node.engine.head.round)]

    def spy(head: Head) -> None:
        set_head(head)
        places.append((head.lineage, head.round))

    node.engine.set_head = spy  # type: ignore[method-assign]
    node.engine.committer._set_head = spy
    return places


def test_a_donor_at_our_own_place_with_more_tokens_makes_nobody_vote_twice() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            places = [places_of(s.peers[name].node) for name in "abc"]
            liar = LyingDonor(s.peers["x"].node)
            liar.beat = lambda beat: {"round": beat.round + 1, "tokens_total": 10**15}
            liar.head = lambda head: {"tokens_total": 10**15}
            await s.until(lambda: liar.asked >= 10 and common(s, 4, 4))
            for stood in places:
                assert len(stood) == len(set(stood)) > 1, stood

    run_virtual(main)


def test_a_donor_that_leads_us_away_and_back_makes_nobody_vote_twice() -> None:
    """By way of another lineage we must not come back to a round in which we may have voted."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            b, liar = s.peers["b"].node, LyingDonor(s.peers["x"].node)
            s.network.partition(["b", "x"])
            await trio.sleep(20)
            stood, home = places_of(b), b.engine.head.lineage
            away: Lie = {"lineage": "7-elsewhere", "tokens_total": 10**15}
            liar.beat = liar.head = lambda _: away
            await s.until(lambda: b.engine.head.lineage == "7-elsewhere")
            back: Lie = {"lineage": home, "tokens_total": 10**16}
            liar.beat = liar.head = lambda _: back
            asked = liar.asked
            await s.until(lambda: liar.asked >= asked + 3)
            assert len(stood) == len(set(stood)) > 1, stood
            await trio.sleep(20)
            assert b.engine.head.lineage != home

    run_virtual(main)


def test_a_head_at_a_place_of_before_is_refused() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            engine = s.peers["b"].node.engine
            head = engine.head
            earlier = msgspec.structs.replace(head, round=head.round - 1)
            assert not engine.history.may_adopt(earlier)
            assert engine.history.may_adopt(msgspec.structs.replace(head, lineage="5-new"))
            for place in (head, earlier):
                with pytest.raises(AssertionError, match="our head before"):
                    engine.set_head(msgspec.structs.replace(place, tokens_total=10**15))
            assert engine.head is head

    run_virtual(main)


@pytest.mark.parametrize("another", [False, True], ids=["always the same", "another each time"])
def test_rounds_go_on_with_a_voter_that_reports_a_ready_record_that_nobody_has(another: bool) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            engine, lies = s.peers["x"].node.engine, 0

            def tell(to: str, message: Message) -> None:
                nonlocal lies
                if isinstance(message, Join):
                    lies += 1
                    message = msgspec.structs.replace(
                        message, ready_attempt=Attempt(0, "x", "z"), ready=unheld(engine.head, lies if another else 0)
                    )
                honest(to, message)

            honest, engine._attempts.tell = engine._attempts.tell, tell  # type: ignore[method-assign]
            began = trio.current_time()
            await s.until(
                lambda: all(
                    sum(r["t"] > began and not r["late"] for r in s.peers[name].rounds("committed")) >= 5
                    for name in "abc"
                ),
                within_s=120,
            )
            assert lies >= 5

    run_virtual(main)


def unheld(head: Head, number: int) -> Record:
    """A well-formed record of the round after a head, with parts that do not exist."""
    assert head.record is not None
    parts = tuple(msgspec.structs.replace(part, sha256=f"{number:064x}") for part in head.record.parts)
    return msgspec.structs.replace(
        head.record, lineage=head.lineage, round=head.round + 1, parent_sha256=head.state_sha256, parts=parts
    )


FORGERIES: dict[str, Lie] = {
    "interval 0": {"intervals": (("a", 0), ("b", 0), ("c", 0))},
    "endless interval": {"intervals": (("a", 2**60),)},
    "interval twice": {"intervals": (("a", 20), ("a", 20))},
    "intervals of too many": {"intervals": tuple((f"p{i}", 20) for i in range(65))},
    "step before the head": {"run_step": -5},
    "step far ahead": {"run_step": 2**60},
    "lr": {"outer_lr": 1e300},
    "momentum": {"outer_momentum": -1.0},
    "optimizer": {"outer_optimizer": "adam"},
    "tokens before the head": {"tokens_total": -1},
    "tokens far ahead": {"tokens_total": 2**62},
    "weight": {"contributors": (Contributor("a", "a.1", -1.0), Contributor("b", "b.2", 1.0))},
    "no weight": {"contributors": (Contributor("a", "a.1", 0.0),)},
}
forgeries = pytest.mark.parametrize("lie", FORGERIES.values(), ids=FORGERIES)


@forgeries
def test_a_forged_proposal_ends_nobody_and_rounds_go_on(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    forged: list[Record] = []
    honest = leader.record_of

    def record_of(*args: Any) -> Record:
        record = honest(*args)
        if len(forged) < 3:
            record = msgspec.structs.replace(record, **lie)
            forged.append(record)
        return record

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2))
            monkeypatch.setattr(leader, "record_of", record_of)

            def gone_on() -> bool:
                assert not any(peer.node.engine.head.record in forged for peer in s.peers.values())
                return len(forged) == 3 and common(s, 3, 2)

            await s.until(gone_on, within_s=120)
            for peer in s.peers.values():
                assert all(np.abs(vector).max() < 1e3 for vector in peer.node.state.vectors)
                assert 0 < peer.exchange.run_step < 2**20

    run_virtual(main)


@forgeries
def test_a_forged_commit_of_our_own_ready_record_ends_nobody(lie: Lie) -> None:
    """As if a quorum of liars had decided it: the peer that refuses it takes the state of the others."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            engine, attempt = s.peers["c"].node.engine, Attempt(0, "x", "z")
            await s.until(lambda: not engine.committer.resolving)
            head = engine.head
            assert head.record is not None
            honest = msgspec.structs.replace(head.record, round=head.round + 1, parent_sha256=head.state_sha256)
            forged = msgspec.structs.replace(honest, **lie)
            acceptor = Acceptor(attempt, attempt, forged)
            engine._attempts.state = dataclasses.replace(engine.round_state, acceptor=acceptor)
            engine.deliver("x", Commit(forged))
            assert engine.round_state.learner.record == forged
            steps = len(s.peers["c"].reports)

            def gone_on() -> bool:
                assert engine.head.record != forged
                return engine.head.round >= head.round + 3

            await s.until(gone_on, within_s=120)
            assert len(s.peers["c"].reports) > steps
            assert all(np.abs(vector).max() < 1e3 for vector in s.peers["c"].node.state.vectors)

    run_virtual(main)
