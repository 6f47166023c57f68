"""Which peer leads the next attempt, and who is barred from it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.protocol.rounds.deciding.leading import (
    ANY_REACH_EVERY,
    barred,
    free_voters,
    is_half_due,
    is_out_of_turn,
    leader_of,
)
from p2ptrain.protocol.wire.messages import Attempt, Commit, Entry, Head
from tests.protocol.rounds.fake_peer import head_of, voters_of
from tests.protocol.signing import Past, record_after


def after_round_of(contributors: str, voters: str = "abc") -> Head:
    commit = Commit(record_after("0-g", "0-l", 4, contributors), Attempt(1, "x", "x.1"), ())
    return replace(head_of(voters=voters), commit=commit)


def led_by(*leaders: str) -> list[Entry]:
    """A history of rounds with these leaders, the last one last."""
    return [
        Entry(Commit(record_after("0-g", "0-l", n, "abc"), Attempt(1, x, x), ()), None) for n, x in enumerate(leaders)
    ]


def leads(
    head: Head, present: str = "abc", counter: int = 0, reach: dict[str, int] | None = None, barred: str = ""
) -> str | None:
    return leader_of(head, counter, set(present), voters_of(present), reach or dict.fromkeys(present, 3), barred)


@pytest.mark.parametrize(
    ("due", "present", "is_half"),
    [("ab", "abcd", True), ("a", "abcd", False), ("axy", "abcdxy", False), ("abc", "ad", False), ("abc", "ab", True)],
)
def test_half_of_the_voters_are_due_and_here(due: str, present: str, is_half: bool) -> None:
    head = head_of(voters="abcd")
    assert is_half_due(head, due, voters_of(present)) == is_half
    assert (leads(head, present) is not None) == (len(set(present) & set("abcd")) > 1)


def test_nobody_leads_before_half_of_the_voters_are_due_or_without_a_quorum() -> None:
    everybody, reach = voters_of("abcd"), dict.fromkeys("abcd", 3)
    assert leader_of(head_of(), 0, "ad", everybody, reach) is None
    assert leader_of(head_of(), 0, "ab", everybody, reach) is not None
    assert leader_of(head_of(voters="abcd"), 0, "bd", voters_of("bd"), reach) is None


def test_of_those_that_reach_most_a_voter_leads_and_in_every_third_attempt_any_voter() -> None:
    found = [leads(head_of(), "abcd", counter) for counter in range(60)]
    assert set(found) == set("abc")
    found = [leads(head_of(), "abcd", counter, {"a": 2, "b": 3, "c": 2, "d": 2}) for counter in range(60)]
    for counter, who in enumerate(found):
        assert who == "b" or counter % ANY_REACH_EVERY == ANY_REACH_EVERY - 1
    assert set(found) == set("abc")
    assert {leads(head_of(), "acd", counter, {"a": 2, "c": 2, "d": 2}) for counter in range(60)} == set("ac")


def test_voters_that_were_not_in_the_last_round_lead_after_the_others() -> None:
    for counter in range(40):
        assert leads(after_round_of("ab"), counter=counter) in ("a", "b")
        assert leads(after_round_of("d"), "abcd", counter=counter) in ("a", "b", "c")


@pytest.mark.parametrize(
    ("voters", "found"), [("ab", ""), ("abc", "c"), ("abcd", "c"), ("abcde", "bc"), ("abcdefg", "abc")]
)
def test_as_many_of_the_last_leaders_are_barred_as_are_fewer_than_half_of_the_voters(voters: str, found: str) -> None:
    head, founding = head_of(voters=voters), Past("digest").entries[0]
    assert barred(head, led_by("x", "a", "b", "c")) == set(found)
    # Those of the lineage before count, too; a founding is no round.
    assert barred(head, [*led_by("x", "a", "b"), founding, *led_by("c"), founding]) == set(found)
    assert barred(head, [founding]) == set()


def test_barred_leaders_lead_only_if_no_other_voter_reaches_nearly_as_many() -> None:
    for round_ in range(40):
        head = head_of(round_, "abcd")
        assert leads(head, "abcd", barred="a") in ("b", "c", "d")
        assert leads(head, "abcdefgh", barred="a") in ("b", "c", "d")
        assert leads(head, "abcd", barred="abc") == "d"
        # Where it is the only one that reaches most; also if it only says so.
        assert leads(head, "abcd", reach={"a": 4, "b": 3, "c": 2, "d": 2}, barred="a") == "b"
        assert leads(head, "abcd", reach={"a": 4, "b": 2, "c": 2, "d": 2}, barred="a") == "a"
        assert leads(head, "abcd", reach={"a": 4, "b": 3, "c": 3, "d": 3}) == "a"
        # Of three, the one that links the others leads all rounds.
        assert leads(head_of(round_), reach={"a": 3, "b": 2, "c": 2}, barred="a") == "a"
    assert {leads(head_of(round_, "abcd"), "abcd", barred="ab") for round_ in range(40)} == set("cd")


@pytest.mark.parametrize(
    ("leader", "reach", "present", "is_out"),
    [
        ("b", {}, "abcdx", True),  # it is barred
        ("c", {}, "abcdx", False),
        ("x", {}, "abcdx", True),  # it does not vote
        ("b", {"a": 2, "b": 4, "c": 2}, "abcdx", False),
        ("b", {"a": 2, "b": 4, "c": 3}, "abcdx", True),
        ("x", {"a": 3, "b": 3, "c": 3, "x": 4}, "abcdx", True),
        ("b", {"a": 2, "b": 4, "c": 3}, "abdx", False),
    ],
)
def test_whoever_is_barred_or_does_not_vote_is_out_of_turn_while_another_reaches_nearly_as_many(
    leader: str, reach: dict[str, int], present: str, is_out: bool
) -> None:
    head = head_of(voters="abcd")
    free = free_voters(head, voters_of(present), "b")
    assert is_out_of_turn(leader, head, free, reach or dict.fromkeys(present, 4)) == is_out


def test_a_voter_that_was_restarted_is_no_voter() -> None:
    head, present = head_of(voters="abcd"), {*voters_of("abd"), ("c", "c.2")}
    assert [peer for peer, _ in free_voters(head, present, "a")] == ["b", "d"]
    for counter in range(40):
        assert leader_of(head, counter, "abd", present, {"a": 3, "b": 2, "c": 3, "d": 2}, "a") in ("b", "d")
