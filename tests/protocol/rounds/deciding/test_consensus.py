"""No two peers learn two records for one round: exhaustive exploration with `consensus.step` itself.

`STATES=1000000` in the environment (or `make storms`) continues with larger scenarios until that many states were seen.
Planted faults show that the search finds mistakes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from p2ptrain.protocol.rounds.deciding import consensus
from p2ptrain.protocol.rounds.deciding.consensus import Joins, Result
from p2ptrain.protocol.rounds.deciding.events import Acceptor, State
from p2ptrain.protocol.wire.messages import Attempt, Commit, Head, Propose
from tests.protocol.explore import Explorer, Scenario

STATES = int(os.environ.get("STATES", "100000"))
# In this order until there are enough states; the first ones always.
ALWAYS = (
    Scenario("ab", "a"),
    Scenario("abc", "a"),
    Scenario("ab", "ab", kept=1, frail="ab", lean=True),
    Scenario("abc", "a", forgotten=1, frail="a", lean=True),
    Scenario("ab", "ab", lean=True, liar=True),
    Scenario("ab", "ab", lean=True, unheld=True),
    Scenario("abc", "ab", lean=True),
)
MORE = (
    Scenario("ab", "ab"),
    Scenario("ab", "ab", forgotten=1, frail="a", lean=True),
    Scenario("abc", "ab", kept=1, frail="a", lean=True),
    Scenario("ab", "a", leads=2),
    Scenario("abc", "ab", lean=True, unheld=True),
)
# What is not large enough to hold a planted fault is not searched for long.
LIMIT = 300_000


@pytest.mark.timeout(1800)  # a million states take a minute or two
@pytest.mark.slow
def test_no_two_records_are_ever_learned(record_property: Callable[[str, object], None]) -> None:
    total, rest = 0, list(MORE)
    for scenario in ALWAYS:
        total += search_all(scenario)
    while total < STATES and rest:
        total += search_all(rest.pop(0))
    if total < STATES:
        found = Explorer(Scenario("abc", "ax", lean=True)).search(STATES - total)
        assert found.conflict is None
        assert found.decided > 0
        total += found.states
    assert total >= STATES
    record_property("shown", f"consensus: {total} states searched, two records learned in none")


def search_all(scenario: Scenario) -> int:
    found = Explorer(scenario).search(10 * max(STATES, 10**6))
    assert found.conflict is None, "\n".join(found.conflict or ())
    assert found.complete
    assert found.decided > 0
    print(f"{found.states} states, in {found.decided} a record is learned: {scenario}")
    return found.states


# --- planted faults --------------------------------------------------------------------------------------------------


def quorum_of_one(present: Any, voters: Any) -> bool:
    return any(voter in present for voter in voters)


def forget_ready(state: State) -> State:
    acceptor = Acceptor(promised=state.acceptor.promised)
    return dataclasses.replace(state, acceptor=acceptor, member=None, proposer=None)


def accept_lower(state: State, message: Propose, now: float) -> Result:
    """Accept whatever is proposed, also below the promise."""
    promised = max(state.acceptor.promised, message.attempt)
    state = dataclasses.replace(state, acceptor=Acceptor(promised, message.attempt, message.proposal))
    return state, (consensus._ready(state, message.attempt, message.proposal.record),)


def same_incarnation(peer: str, incarnation: str, head: Any, limits: Any) -> State:
    """Started anew, without memory, under the old incarnation: it votes a second time."""
    return State(peer, "1", head, limits)


def begin_again(state: State) -> State:
    """The head is set to where it is."""
    return State(state.peer, state.incarnation, state.head, state.limits)


def count_whom_we_ignore(state: State, joins: Joins) -> Joins:
    """A READY record that could not be had is left out, and the promise of who reported it is not."""
    return tuple(
        (peer, msgspec.structs.replace(join, ready=None, ready_attempt=None))
        if join.ready is not None and join.ready.record.sha256 in state.unheld
        else (peer, join)
        for peer, join in joins
    )


def believe_anybody(commit: Commit, head: Head) -> bool:
    return True


def attempt_of_any_incarnation(counter: int, leader: str, incarnation: str) -> Attempt:
    """Started anew, a leader uses a number again."""
    return Attempt(counter, leader, "")


@pytest.mark.parametrize(
    ("rule", "fault", "scenario"),
    [
        ("consensus.is_quorum", quorum_of_one, Scenario("abc", "ab", lean=True)),
        ("explore.restarted", forget_ready, Scenario("ab", "ab", kept=1, frail="ab", lean=True)),
        ("explore.restarted", begin_again, Scenario("ab", "ab", kept=1, frail="ab", lean=True)),
        ("consensus._on_proposal", accept_lower, Scenario("ab", "ab", lean=True)),
        ("consensus.unfinished", lambda joins, voters: None, Scenario("ab", "ab", lean=True)),
        ("consensus.heeded", count_whom_we_ignore, Scenario("ab", "ab", lean=True, unheld=True)),
        ("events.State", same_incarnation, Scenario("ab", "ab", forgotten=1, frail="a", lean=True)),
        ("explore.is_proven", believe_anybody, Scenario("ab", "ab", lean=True, liar=True)),
        ("consensus.m.Attempt", attempt_of_any_incarnation, Scenario("ba", "xy", forgotten=1, frail="x", lean=True)),
    ],
    ids=[
        "a quorum of one", "READY forgotten on restart", "READY forgotten as the same head is set",
        "a lower attempt accepted", "a reported READY ignored", "a promise counted whose READY was ignored",
        "an incarnation that votes twice", "a Commit believed without proof", "an attempt's number used twice",
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    rule: str,
    fault: Any,
    scenario: Scenario,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
) -> None:
    package = "tests.protocol" if rule.startswith("explore.") else "p2ptrain.protocol.rounds.deciding"
    monkeypatch.setattr(f"{package}.{rule}", fault)
    found = Explorer(scenario).search(LIMIT)
    assert found.conflict is not None
    what = request.node.callspec.id
    record_property("shown", f"consensus: {what}: found with {found.states} states, {len(found.conflict)} moves deep")


def test_alike_peers_are_told_apart_only_by_what_they_did() -> None:
    whole = Explorer(Scenario("abc", "a"))
    assert [renaming.names for renaming in whole._renamings] == [{"b": "c", "c": "b"}]
    merged, apart = whole.search(LIMIT), Explorer(Scenario("abc", "a"))
    apart._renamings = []
    every = apart.search(LIMIT)
    assert merged.complete
    assert every.complete
    assert every.states / 2 <= merged.states < every.states
