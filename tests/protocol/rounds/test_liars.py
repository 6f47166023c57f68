"""Peers that lie about where they stand or what they accepted: nobody votes twice for them, and rounds go on."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import trio
from msgspec.structs import replace

from p2ptrain.errors import WireError
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.deciding.timeouts import MIN_ATTEMPT_S
from p2ptrain.protocol.rounds.deciding.voters import Voter, next_voters, seen_of
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.moving import leader
from p2ptrain.protocol.wire.messages import (
    MAX_REACH,
    Abort,
    Attempt,
    Beat,
    Call,
    Commit,
    Contributor,
    Head,
    Join,
    Message,
    Proposal,
    Propose,
    Ready,
    Record,
    RosterPart,
    SignedHead,
    View,
    Vote,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.signing import signed_by
from tests.protocol.swarm import RUN, Swarm, common, run_virtual, start_all, swarm

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
        return replace(beat, **self.beat(beat))

    def _signed(self, signed: SignedHead | None) -> SignedHead | None:
        if signed is None:
            return None
        head = self._head(signed.head)
        self.asked += head != signed.head
        return replace(signed, head=head)

    def _head(self, head: Head) -> Head:
        return replace(head, **self.head(head))


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
            earlier = replace(head, round=head.round - 1)
            assert not driver.past_heads.may_adopt(earlier)
            assert driver.past_heads.may_adopt(replace(head, lineage="5-new"))
            for place in (head, earlier):
                with pytest.raises(AssertionError, match="our head before"):
                    driver._set_head(replace(place, tokens_total=10**15))
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
                    made_up = Proposal(unheld(driver.head, lies if another else 0), ())
                    message = replace(message, ready_attempt=Attempt(0, "x", "z"), ready=made_up)
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
    parts = tuple(replace(part, digest=f"{number:064x}") for part in head.record.parts)
    return replace(
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
    honest = leader.proposal_of

    def proposal_of(*args: Any) -> Proposal:
        proposal = honest(*args)
        if len(forged) < 3:
            forged.append(replace(proposal.record, **lie))
            proposal = replace(proposal, record=forged[-1])
        return proposal

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 1, 2))
            monkeypatch.setattr(leader, "proposal_of", proposal_of)

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
            honest = replace(head.record, round=head.round + 1, parent_hash=head.state_hash)
            forged = replace(honest, **lie)
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


def lead_always(x: Node) -> None:
    """Call an attempt at each round as soon as somebody is due, also out of turn."""
    schedule, rotation = x.driver._schedule, x.driver._rotation
    schedule.is_ours_to_lead = lambda head, *_: bool(rotation.due_for(head))  # type: ignore[method-assign]


async def next_heads(s: Swarm, driver: RoundDriver, count: int) -> AsyncIterator[Head]:
    """The heads of a peer after each of its next rounds."""
    first = driver.head.round + 1
    for number in range(first, first + count):
        await s.until(functools.partial(lambda number: driver.head.round >= number, number))
        yield driver.head


def see(x: Node, *peers: Voter) -> None:
    """Say in each view that only these are there."""
    prover = x.driver.context.prover
    view = prover.view
    prover.view = lambda head, _: view(head, seen_of(peers))  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("honest", "weight", "is_voter"), [("ab", 1.0, True), ("abcdefg", 0.0, True), ("abc", 1.0, False)]
)
def test_who_makes_up_contributors_makes_up_no_voters(
    honest: str, weight: float, is_voter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x leads out of turn, reduces the only part, names and sees contributors whose keys it has, and claims a reach.

    It leads at most every second round; none if it does not vote.
    """
    made_up = [(f"s{i:02}", "s") for i in range(20)]
    run_leader = leader.AveragingLeader.run

    async def run(self: leader.AveragingLeader, joins: dict[str, Join]) -> Proposal:
        proposal = await run_leader(self, joins)
        context, record = self._context, proposal.record
        if context.peer_id != "x":
            return proposal
        (part,) = record.parts
        each = weight * record.contributors[0].weight
        contributors = (*(Contributor(*one, each, bytes(32)) for one in made_up), *record.contributors)
        mean = context.parts.get(part.digest)
        assert mean is not None
        digest = part_digest(mean, contributors, (part.start, part.stop))
        context.parts.add(digest, mean)
        voters = next_voters(self._head, contributors, proposal.views)
        record = replace(record, contributors=contributors, parts=(replace(part, digest=digest),), voters=voters)
        return replace(proposal, record=record)

    monkeypatch.setattr(leader.AveragingLeader, "run", run)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, honest + "x" * is_voter)
            await s.until(lambda: common(s, 2, len(honest) + is_voter))
            x = s.peers["x"].node if is_voter else s.start("x").node
            await s.until(lambda: x.ready.is_set())
            see(x, x.driver.context.liveness.own, *made_up)
            context = x.driver.context
            alone = [RosterPart(context.grid.first, context.grid.end, "x", ())]
            monkeypatch.setattr(context.averaging, "plan", lambda *_: alone)
            lead_always(x)
            make = x.make_beat
            x.make_beat = lambda *times: replace(make(*times), reach=MAX_REACH)  # type: ignore[method-assign]
            driver = s.peers["a"].node.driver
            lineage, named, led = driver.head.lineage, 0, 0
            async for head in next_heads(s, driver, 12):
                assert head.commit is not None
                led += head.commit.attempt.leader == "x"
                named += any(incarnation == "s" for _, incarnation in head.contributors)
                assert set(honest) <= {name for name, _ in head.voters} <= set(honest + "x")
            assert named == led
            assert (2 if is_voter else 0) <= led <= (6 if is_voter else 0)
            assert driver.head.lineage == lineage

    run_virtual(main)


def test_attempts_that_their_leader_holds_make_later_ones_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """x says nothing after its Roster, in each round that it leads."""
    wait = leader.AveragingLeader._await_contributions

    async def _await_contributions(self: leader.AveragingLeader) -> list[str]:
        return await (trio.sleep_forever() if self._context.peer_id == "x" else wait(self))

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 3, 3))
            monkeypatch.setattr(leader.AveragingLeader, "_await_contributions", _await_contributions)
            a, x = (s.peers[name].node.driver for name in "ax")
            lead_always(s.peers["x"].node)
            tell = x._attempts.tell
            x._attempts.tell = lambda to, m: None if isinstance(m, Abort) else tell(to, m)  # type: ignore[method-assign]
            await trio.sleep(600.0)
            before = a.head.round
            await s.until(lambda: a.head.round > before + 20, within_s=600)
            assert a.context.timeouts.attempt_s() == MIN_ATTEMPT_S

    run_virtual(main)


@pytest.mark.parametrize("calls", [False, True])
def test_who_leads_every_round_and_leaves_out_half_takes_no_vote(calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """x names and sees the same half in each round, or calls the other half away from the rounds that they join."""
    wait = leader.AveragingLeader._await_contributions

    async def _await_contributions(self: leader.AveragingLeader) -> list[str]:
        included = await wait(self)
        return [name for name in included if name in "abx"] if self._context.peer_id == "x" else included

    monkeypatch.setattr(leader.AveragingLeader, "_await_contributions", _await_contributions)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcdex")
            await s.until(lambda: common(s, 2, 6))
            x = s.peers["x"].node
            see(x, x.driver.context.liveness.own, s.peers["a"].node.driver.context.liveness.own)
            lead_always(x)
            called = 0
            if calls:
                tell = x.driver._attempts.tell

                def call_away(to: str, message: Message) -> None:
                    nonlocal called
                    called += isinstance(message, Call) and to in "cde"
                    if not (isinstance(message, Call) and to in "ab"):
                        tell(to, message)

                x.driver._attempts.tell = call_away  # type: ignore[method-assign]
            driver = s.peers["e"].node.driver
            lineage, led = driver.head.lineage, 0
            async for head in next_heads(s, driver, 24):
                assert head.commit is not None
                led += head.commit.attempt.leader == "x"
                assert set("abcde") <= {name for name, _ in head.voters} <= set("abcdex")
            assert called >= 20 if calls else 6 <= led <= 12
            assert driver.head.lineage == lineage

    run_virtual(main)


def test_a_liar_that_was_restarted_votes_once() -> None:
    """It sees both of its incarnations."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 2, 3))
            before = s.peers["x"].node.driver.context.liveness.own
            s.kill("x")
            await trio.sleep(1.0)
            x = s.start("x", chosen=["a"]).node
            await s.until(lambda: x.ready.is_set())
            a = s.peers["a"].node.driver
            own, others = x.driver.context.liveness.own, a.context.liveness.own
            see(x, own, before, others)
            async for head in next_heads(s, a, 12):
                assert len({name for name, _ in head.voters}) == len(head.voters)
                assert {"a", "b"} <= {name for name, _ in head.voters}
            assert own in a.head.voters

    run_virtual(main)


def _forged(x: RoundDriver, a: RoundDriver, lie: str) -> tuple[View | None, Proposal | None]:
    """A view, or a proposal that was accepted, as no honest peer has it."""
    view = x.context.prover.view(a.head, seen_of([x.context.liveness.own]))
    assert a.head.record is not None
    record = replace(a.head.record, round=a.head.round + 1, parent_hash=a.head.state_hash)
    match lie:
        case "view of another round":
            return x.context.prover.view(replace(a.head, round=1000), view.seen), None
        case "view of another peer":
            return replace(view, peer_id="b"), None
        case "view of another incarnation":
            return replace(view, incarnation="x.9"), None
        case "record with its own voters":
            return view, Proposal(replace(record, voters=(x.context.liveness.own,)), ())
    return view, Proposal(replace(record, voters=a.head.voters), (replace(view, signature=b""),))


@pytest.mark.parametrize(
    "lie",
    [
        "view of another round",
        "view of another peer",
        "view of another incarnation",
        "record with its own voters",
        "record with a forged view",
    ],
)
@pytest.mark.parametrize("kind", ["Join", "Propose"])
def test_forged_views_and_voters_cost_the_link(lie: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 2, 3))
            a, x = (s.peers[name].node.driver for name in "ax")
            tell, lied = x._attempts.tell, 0

            def forge(to: str, message: Message) -> None:
                nonlocal lied
                if to == "a" and isinstance(message, Join) and kind == "Join":
                    view, proposal = _forged(x, a, lie)
                    attempt = Attempt(0, "z", "z") if proposal is not None else None
                    message, lied = replace(message, view=view, ready=proposal, ready_attempt=attempt), lied + 1
                if to == "a" and isinstance(message, Propose) and kind == "Propose":
                    view, proposal = _forged(x, a, lie)
                    forged = proposal or replace(message.proposal, views=(view,) if view else ())
                    message, lied = replace(message, proposal=forged), lied + 1
                tell(to, message)

            x._attempts.tell = forge  # type: ignore[method-assign]
            await s.until(lambda: "x" in a.context.links.strikes)
            assert lied

    run_virtual(main)
    reasons = "a view that its owner has not signed|the view of another peer|a record with other|a proposal whose"
    assert re.search(reasons, caplog.text)


def test_the_view_of_a_peer_that_does_not_vote_costs_no_leader_its_link() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            x = s.start("x").node
            await s.until(lambda: x.ready.is_set())
            tell, lied = x.driver._attempts.tell, 0

            def claim(to: str, message: Message) -> None:
                nonlocal lied
                if isinstance(message, Join) and message.view is None:
                    lied += 1
                    message = replace(message, view=x.driver.context.prover.view(x.driver.head, b""))
                tell(to, message)

            x.driver._attempts.tell = claim  # type: ignore[method-assign]
            await s.until(lambda: common(s, 6, 3))
            assert lied
            assert not any(peer.node.driver.context.links.strikes for peer in s.peers.values())

    run_virtual(main)


def test_a_join_of_another_incarnation_than_the_links_is_not_counted() -> None:
    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 2, 3))
            x = s.peers["x"].node.driver
            tell, before = x._attempts.tell, x.head.round

            def lie(to: str, message: Message) -> None:
                if isinstance(message, Join) and to != "x":
                    message = replace(message, incarnation="k/0", view=None)
                tell(to, message)

            x._attempts.tell = lie  # type: ignore[method-assign]
            a = s.peers["a"].node.driver
            await s.until(lambda: a.head.round >= before + 8)
            assert a.head.record is not None
            assert not any(incarnation == "k/0" for _, incarnation in (*a.head.voters, *a.head.contributors))
            assert not a.context.links.strikes

    run_virtual(main)


@pytest.mark.parametrize("helper", [False, True])
def test_who_claims_to_reach_everybody_leads_no_more_rounds_for_it(
    helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A voter was restarted, so nobody reaches all. x leaves the views of the others out of its records.

    A helper that does not vote sends Dues that ask for a later attempt.
    """
    honest = leader.proposal_of

    def proposal_of(run: RunConfig, head: Head, joins: dict[str, Join], *args: Any) -> Proposal:
        if any(name == "x" for name, join in joins.items() if join.attempt.leader == "x"):
            joins = {name: replace(join, view=join.view if name == "x" else None) for name, join in joins.items()}
        return honest(run, head, joins, *args)

    monkeypatch.setattr(leader, "proposal_of", proposal_of)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcdx" + "y" * helper)
            await s.until(lambda: common(s, 2, 5 + helper))
            x = s.peers["x"].node
            make = x.make_beat
            x.make_beat = lambda *times: replace(make(*times), reach=len(x.driver.head.voters))  # type: ignore[method-assign]
            lead_always(x)
            a = s.peers["a"].node.driver
            for name in "bcd":
                s.kill(name)
                s.start(name)
                own = s.peers[name].node.driver.context.liveness.own
                await s.until(lambda own=own: own in a.head.voters, within_s=120)  # type: ignore[misc]
            lineage, led = a.head.lineage, list[str]()
            async for head in next_heads(s, a, 20):
                assert head.commit is not None
                led.append(head.commit.attempt.leader)
            assert led.count("x") <= 10
            assert a.head.lineage == lineage

    run_virtual(main)


def test_two_of_five_that_take_turns_keep_no_newcomer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name only those that voted when they began."""
    wait = leader.AveragingLeader._await_contributions

    async def _await_contributions(self: leader.AveragingLeader) -> list[str]:
        included = await wait(self)
        return [name for name in included if name != "e"] if self._context.peer_id in "xy" else included

    monkeypatch.setattr(leader.AveragingLeader, "_await_contributions", _await_contributions)

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "abcxy")
            await s.until(lambda: common(s, 2, 5))
            for name in "xy":
                lead_always(s.peers[name].node)
            a = s.peers["a"].node.driver
            e = s.start("e").node
            await s.until(lambda: e.driver.context.liveness.own in a.head.voters, within_s=120)

    run_virtual(main)


def test_a_head_with_another_record_than_its_history_is_not_adopted() -> None:
    """Its contributors are those whose fragments a joiner merges."""

    async def main() -> None:
        async with swarm(dataclasses.replace(PLAIN, sync_every=200)) as s:
            start_all(s, "abx")
            await s.until(lambda: common(s, 2, 3))
            donor = LyingDonor(s.peers["x"].node)

            def forged(head: Head) -> Lie:
                assert head.commit is not None
                mine = tuple(c for c in head.commit.record.contributors if c.peer_id == "x")
                return {"commit": replace(head.commit, record=replace(head.commit.record, contributors=mine))}

            donor.head = forged
            j = s.start("j", chosen=["x"]).node
            await s.until(lambda: donor.asked > 0 and (j.ready.is_set() or "x" in j.links.strikes))
            await s.until(lambda: j.ready.is_set())
            assert {name for name, _ in j.driver.head.contributors} >= set("ab")

    run_virtual(main)


def test_joins_of_earlier_rounds_cost_no_link() -> None:
    """Attempts are counted anew in each round: such a Join has the attempt of this one."""

    async def main() -> None:
        async with swarm(PLAIN) as s:
            start_all(s, "ab")
            await s.until(lambda: common(s, 2, 2))
            tell, late, sent = s.peers["b"].node.driver._attempts.tell, list[Message](), 0

            def replay(to: str, message: Message) -> None:
                nonlocal sent
                if to == "a" and isinstance(message, Join):
                    for old in late[-3:]:
                        tell(to, old)
                        sent += 1
                    late.append(message)
                tell(to, message)

            s.peers["b"].node.driver._attempts.tell = replay  # type: ignore[method-assign]
            await s.until(lambda: common(s, 12, 2))
            assert sent > 10
            assert not s.peers["a"].node.driver.context.links.strikes

    run_virtual(main)
