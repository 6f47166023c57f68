"""Peers that lie about where they stand or what they accepted: nobody votes twice for them, and rounds go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.rounds.moving import leader
from p2ptrain.protocol.wire.messages import (
    Attempt,
    Beat,
    Commit,
    Contributor,
    Head,
    Join,
    Message,
    Ready,
    Record,
    SignedHead,
    Vote,
)
from tests.protocol.signing import signed_by
from tests.protocol.swarm import RUN, common, run_virtual, start_all, swarm

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

        class Driver:
            committer = node.driver.committer
            head = property(lambda _: self._head(node.driver.head))
            history = property(lambda _: node.driver.history)
            signed_head = property(lambda driver: self._signed(node.driver.signed_head))

        node._server._state._driver = Driver()  # type: ignore[assignment]

    def _beat(self, beat: Beat) -> Beat:
        return msgspec.structs.replace(beat, **self.beat(beat))

    def _signed(self, signed: SignedHead | None) -> SignedHead | None:
        if signed is None:
            return None
        head = self._head(signed.head)
        self.asked += head != signed.head
        return msgspec.structs.replace(signed, head=head)

    def _head(self, head: Head) -> Head:
        return msgspec.structs.replace(head, **self.head(head))


def places_of(node: Node) -> list[tuple[str, int]]:
    """Where a node stands, and each place that it stands at from now on, in order."""
    set_head, places = node.driver._set_head, [(node.driver.head.lineage, node.driver.head.round)]

    def spy(head: Head, votes: Sequence[Vote] = ()) -> None:
        set_head(head, votes)
        places.append((head.lineage, head.round))

    node.driver._set_head = spy  # type: ignore[method-assign]
    return places


@pytest.mark.parametrize(
    ("beat", "head"),
    [
        ({"tokens_total": 10**15}, {"tokens_total": 10**15}),
        ({"lineage": "7-elsewhere", "tokens_total": 10**15}, {"lineage": "7-elsewhere", "tokens_total": 10**15}),
        ({"lineage": "7-elsewhere"}, {"lineage": "7-elsewhere", "state_hash": "0" * 64, "voters": (("x", "x.4"),)}),
        ({"lineage": "7-elsewhere"}, {"genesis": "0-other", "lineage": "0-other", "voters": (("x", "x.4"),)}),
    ],
    ids=["more tokens", "another lineage", "another state and voters", "another run"],
)
def test_a_donor_whose_head_is_not_signed_is_not_followed_and_is_struck(beat: Lie, head: Lie) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            lineage, genesis = s.peers["a"].node.driver.head.lineage, s.peers["a"].node.driver.head.genesis
            places = [places_of(s.peers[name].node) for name in "abc"]
            liar = LyingDonor(s.peers["x"].node)
            liar.beat = lambda told: {"round": told.round + 1, **beat}
            liar.head = lambda told: head
            began = trio.current_time()

            def gone_on() -> bool:
                rounds = [s.peers[name].rounds("committed") for name in "abc"]
                return liar.asked > 0 and all(sum(r["t"] > began for r in of) >= 4 for of in rounds)

            await s.until(gone_on)
            for stood in places:
                assert len(stood) == len(set(stood)) > 1, stood
            for name in "abc":
                at = s.peers[name].node.driver.head
                assert (at.lineage, at.genesis) == (lineage, genesis)
            assert any(s.peers[name].node.links.strikes.get("x") for name in "abc")

    run_virtual(main)


def test_a_lineage_that_one_member_founds_is_not_followed() -> None:
    """Well formed and signed, from the head that all have, and with rounds of its own since."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            lineage = s.peers["a"].node.driver.head.lineage
            driver = s.peers["x"].node.driver
            await s.until(lambda: not driver.committer.resolving)
            async with driver.paused():
                driver.found_lineage(driver.head, driver.history, "a test")
            began = trio.current_time()
            await s.until(lambda: len([r for r in s.peers["a"].rounds("committed") if r["t"] > began]) >= 4)
            assert {s.peers[name].node.driver.head.lineage for name in "abc"} == {lineage}
            # And x comes back, as the others go on with a quorum.
            await s.until(lambda: driver.head.lineage == lineage)

    run_virtual(main)


def test_a_head_at_a_place_of_before_is_refused() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            driver = s.peers["b"].node.driver
            head = driver.head
            earlier = msgspec.structs.replace(head, round=head.round - 1)
            assert not driver.past_heads.may_adopt(earlier)
            assert driver.past_heads.may_adopt(msgspec.structs.replace(head, lineage="5-new"))
            for place in (head, earlier):
                with pytest.raises(AssertionError, match="our head before"):
                    driver._set_head(msgspec.structs.replace(place, tokens_total=10**15))
            assert driver.head is head

    run_virtual(main)


@pytest.mark.parametrize("another", [False, True], ids=["always the same", "another each time"])
def test_rounds_go_on_with_a_voter_that_reports_a_ready_record_that_no_member_has(another: bool) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcx")
            await s.until(lambda: common(s, 2, 4))
            driver, lies = s.peers["x"].node.driver, 0

            def tell(to: str, message: Message) -> None:
                nonlocal lies
                if isinstance(message, Join):
                    lies += 1
                    message = msgspec.structs.replace(
                        message, ready_attempt=Attempt(0, "x", "z"), ready=unheld(driver.head, lies if another else 0)
                    )
                honest(to, message)

            honest, driver._attempts.tell = driver._attempts.tell, tell  # type: ignore[method-assign]
            began = trio.current_time()
            await s.until(
                lambda: all(
                    sum(r["t"] > began and not r["late"] for r in s.peers[name].rounds("committed")) >= 5
                    for name in "abc"
                ),
                within_s=120,
            )
            assert lies >= 5
            # Nobody avoids the reducers that the record names.
            assert not any(s.peers[name].node.driver.context.avoided.backed_off(began) for name in "abc")

    run_virtual(main)


def unheld(head: Head, number: int) -> Record:
    """A well-formed record of the round after a head, of half of the peers, with parts that do not exist."""
    assert head.record is not None
    parts = tuple(msgspec.structs.replace(part, digest=f"{number:064x}") for part in head.record.parts)
    return msgspec.structs.replace(
        head.record, lineage=head.lineage, round=head.round + 1, parent_hash=head.state_hash,
        contributors=head.record.contributors[-2:], parts=parts,
    )  # fmt: skip


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
    "weight": {"contributors": (Contributor("a", "a.1", -1.0, bytes(32)), Contributor("b", "b.2", 1.0, bytes(32)))},
    "no weight": {"contributors": (Contributor("a", "a.1", 0.0, bytes(32)),)},
}
forgeries = pytest.mark.parametrize("lie", FORGERIES.values(), ids=FORGERIES)


@forgeries
def test_a_forged_proposal_ends_no_peer_and_rounds_go_on(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
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
                assert not any(peer.node.driver.head.record in forged for peer in s.peers.values())
                return len(forged) == 3 and common(s, 3, 2)

            await s.until(gone_on, within_s=120)
            for peer in s.peers.values():
                assert all(np.abs(vector).max() < 1e3 for vector in peer.node.state.vectors)
                assert 0 < peer.exchange.run_step < 2**20

    run_virtual(main)


@forgeries
def test_a_forged_commit_ends_no_peer_even_if_a_quorum_signed_it(lie: Lie) -> None:
    """The peer that refuses it takes the state of the others."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            driver, attempt = s.peers["c"].node.driver, Attempt(0, "x", "z")
            await s.until(lambda: not driver.committer.resolving)
            head = driver.head
            assert head.record is not None
            honest = msgspec.structs.replace(head.record, round=head.round + 1, parent_hash=head.state_hash)
            forged = msgspec.structs.replace(honest, **lie)
            unproven = signed_by("abc", forged, PLAIN.digest, attempt)
            names = {peer.peer_id: peer.node.incarnation for peer in s.peers.values()}
            votes = []
            for name, incarnation in names.items():
                prover = s.peers[name].node.driver.context.prover
                ready = Ready(forged.lineage, forged.round, attempt, incarnation, forged.sha256, b"")
                votes.append(Vote(name, incarnation, prover.signed_ready(ready).signature))
            for commit in (unproven, Commit(forged, attempt, ()), Commit(forged, attempt, tuple(votes[:1] * 3))):
                with pytest.raises(WireError):
                    driver.deliver("x", commit)
            assert driver.round_state.learned is None
            driver.deliver("x", Commit(forged, attempt, tuple(votes)))
            assert driver.round_state.learned is not None
            steps = len(s.peers["c"].reports)

            def gone_on() -> bool:
                assert driver.head.record != forged
                return driver.head.round >= head.round + 3

            await s.until(gone_on, within_s=120)
            assert len(s.peers["c"].reports) > steps
            assert all(np.abs(vector).max() < 1e3 for vector in s.peers["c"].node.state.vectors)

    run_virtual(main)
