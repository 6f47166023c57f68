"""Whose fragments are merged: the contributors of the last few rounds, as far as this peer knows them."""

from __future__ import annotations

import msgspec
import pytest

from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.deciding.policy import RECENT_ROUNDS, RecentContributors
from p2ptrain.protocol.rounds.deciding.record import check_company
from p2ptrain.protocol.wire.messages import Attempt, Commit, Contributor, Head, Record
from tests.protocol.test_messages import example_of


def head(round_: int, contributors: str, lineage: str = "L", record_lineage: str | None = None) -> Head:
    named = tuple(Contributor(peer_id, "1", 1.0, b"") for peer_id in contributors)
    record = msgspec.structs.replace(
        example_of(Record), lineage=record_lineage or lineage, round=round_, contributors=named
    )
    return Head("L", lineage, round_, "", "", (), 0, 0, Commit(record, Attempt(0, "a", "1"), ()))


def admitted(recent: RecentContributors) -> str:
    return "".join(filter(recent.admits, "abcdefgx"))


def test_before_the_first_round_everybody_is_admitted() -> None:
    assert admitted(RecentContributors()) == "abcdefgx"
    assert admitted(RecentContributors().after(Head("L", "L", -1, "", "", (), 0, 0, None))) == "abcdefgx"


def test_a_joiner_knows_the_contributors_of_its_head() -> None:
    assert admitted(RecentContributors().after(head(7, "ab"))) == "ab"


def test_contributors_of_the_last_eight_rounds_are_admitted() -> None:
    recent = RecentContributors().after(head(0, "abc"))
    for round_ in range(1, RECENT_ROUNDS):
        recent = recent.after(head(round_, "ab"))
        assert admitted(recent) == "abc"
    assert admitted(recent.after(head(RECENT_ROUNDS, "ad"))) == "abd"


def test_rounds_that_this_peer_missed_count_as_well() -> None:
    recent = RecentContributors().after(head(3, "ab")).after(head(4, "ac"))
    assert admitted(recent.after(head(9, "d"))) == "abcd"
    assert admitted(recent.after(head(11, "d"))) == "acd"
    assert admitted(recent.after(head(99, "d"))) == "d"


def test_another_lineage_begins_anew_and_one_that_follows_ours_does_not() -> None:
    recent = RecentContributors().after(head(3, "ab"))
    assert admitted(recent.after(head(4, "cd", lineage="M"))) == "cd"
    follows = recent.after(head(3, "ab", lineage="M", record_lineage="L"))
    assert admitted(follows) == "ab"
    assert admitted(follows.after(head(4, "a", lineage="M"))) == "ab"
    # Back to a checkpoint of before the first round.
    assert admitted(recent.after(Head("L", "M", -1, "", "", (), 0, 0, None))) == "abcdefgx"


def test_memory_is_bounded() -> None:
    recent = RecentContributors()
    for round_ in range(1000):
        recent = recent.after(head(round_, "ab"))
    assert len(recent.rounds) == RECENT_ROUNDS


def test_a_leader_that_names_as_few_as_it_may_keeps_half_of_the_contributors() -> None:
    """In each of the next rounds at least; whoever leads another one may name the others again."""
    names = "abcdefghijklmnop"
    recent = RecentContributors().after(head(0, names))
    for round_ in range(1, RECENT_ROUNDS + 1):
        known = {(name, "1") for name in names if recent.admits(name)}
        few, too_few = head(round_, names[:8]), head(round_, names[:7])
        assert few.record is not None
        assert too_few.record is not None
        check_company(few.record, known)
        with pytest.raises(RoundFailedError, match="names 7 of the 16 peers"):
            check_company(too_few.record, known)
        recent = recent.after(few)
