"""Which peer leads the next attempt, and whose Calls are followed; without links."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S
from p2ptrain.protocol.rounds.turns import DUE_AGAIN_S, MAX_DUE_AHEAD, leader_of
from p2ptrain.protocol.wire.messages import Attempt, Commit, Due, Head
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.room import Room, begun, head_of
from tests.protocol.signing import record_after

# --- Dues ----------------------------------------------------------------------------------------------------


def test_dues_count_for_this_round_and_the_one_after_it_in_this_lineage() -> None:
    turns = begun(Room()).turns
    head = head_of()
    taken = {round_: turns.note_due("b", Due("0-l", round_, 0), head, 100.0) for round_ in range(3, 9)}
    assert taken == {3: False, 4: False, 5: True, 6: True, 7: False, 8: False}
    assert not turns.note_due("b", Due("1-l", 5, 0), head, 100.0)


@pytest.mark.parametrize(
    ("peers", "claims", "counter"),
    [
        ("b", {"b": 3}, 0), ("b", {"a": 3, "b": 99}, 3), ("bc", {"b": 3}, 0), ("bc", {"b": 3, "c": 5}, 3),
        ("bcd", {"b": 7, "c": 5, "d": 1}, 5), ("bcd", {"b": 99, "c": 98}, MAX_DUE_AHEAD),
    ],
)  # fmt: skip
def test_the_attempt_expected_next_is_what_half_of_the_voters_report(
    peers: str, claims: dict[str, int], counter: int
) -> None:
    turns = begun(Room(peers)).turns
    for sender, claim in claims.items():
        assert turns.note_due(sender, Due("0-l", 5, claim), head_of(), 100.0)
    turns.note_due("b", Due("0-l", 6, 1000), head_of(), 100.0)
    assert turns.counter == counter


def test_the_counters_of_who_sends_too_many_dues_are_not_heard() -> None:
    turns, head = begun(Room("b")).turns, head_of(voters="b")
    for number in range(100):
        turns.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + 0.01 * number)
    assert turns.counter == MAX_DUE_AHEAD
    turns.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + DUE_AGAIN_S)
    assert turns.counter == 2 * MAX_DUE_AHEAD


def test_a_new_head_forgets_dues_of_its_round_and_another_lineage_forgets_all() -> None:
    for same_lineage, leads in ((True, True), (False, False)):
        turns = begun(Room("", run=RunConfig())).turns
        turns.note_due("a", Due("0-l", 5, 0), head_of(voters="a"), 100.0)
        turns.note_due("a", Due("0-l", 6, 0), head_of(voters="a"), 100.0)
        assert turns.is_ours(head_of(voters="a"), 100.0)
        turns.begin(head_of(5, "a"), 101.0, same_lineage=same_lineage)
        assert not turns.is_ours(head_of(4, "a"), 101.0)
        assert turns.is_ours(head_of(5, "a"), 101.0) == leads
        turns.skip(6)
        assert not turns.is_ours(head_of(5, "a"), 101.0)


# --- whose turn it is -------------------------------------------------------------------------------------------


def led_by(leader: str, contributors: str = "abc", voters: str = "abc", round_: int = 4) -> Head:
    commit = Commit(record_after("0-g", "0-l", round_, contributors), Attempt(1, leader, f"{leader}.1"), ())
    return replace(head_of(round_, voters), commit=commit)


def leads(
    head: Head, present: str = "abc", counter: int = 0, reach: dict[str, int] | None = None, barred: str = ""
) -> str | None:
    voters = [(name, f"{name}.1") for name in present]
    return leader_of(head, counter, set(present), voters, reach or dict.fromkeys(present, 3), barred)


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


def test_voters_that_were_not_in_the_last_round_lead_after_the_others() -> None:
    for counter in range(40):
        assert leads(led_by("x", contributors="ab"), counter=counter) in ("a", "b")
        assert leads(led_by("x", contributors="d"), "abcd", counter=counter) in ("a", "b", "c")


@pytest.mark.parametrize(
    ("leader", "reach", "ignored", "is_out"),
    [
        ("b", None, "", True),  # it led the last round
        ("c", None, "", False),
        ("x", None, "", True),  # it does not vote
        ("b", {"a": 2, "b": 4, "c": 2}, "", False),
        ("b", {"a": 2, "b": 4, "c": 3}, "", True),
        ("x", {"a": 3, "b": 3, "c": 3, "x": 4}, "", True),
        ("b", {"a": 2, "b": 4, "c": 3}, "c", False),
    ],
)
def test_until_half_of_the_voters_are_due_for_long_the_last_leader_and_strangers_are_not_followed(
    leader: str, reach: dict[str, int] | None, ignored: str, is_out: bool
) -> None:
    head = led_by("b", voters="abcd")

    def out_of_turn(due_s: dict[str, float], now: float, followed: str | None = None) -> bool:
        turns = Room("bcdx", reach=reach or dict.fromkeys("abcdx", 4)).schedule().turns
        turns.begin(head, 100.0, same_lineage=True)
        for sender, at_s in due_s.items():
            turns.note_due(sender, Due("0-l", 5, 0), head, at_s)
        for peer in ignored:
            turns.ignore(peer, now)
        if followed is not None:
            assert turns.is_out_of_turn(leader, head, now - 0.1, followed) == (leader != "c")
        return turns.is_out_of_turn(leader, head, now, None)

    assert out_of_turn({"a": 100.0, "x": 100.0}, 1000.0) == is_out
    assert out_of_turn({"a": 100.0, "d": 103.0}, 103.0 + DUE_AGAIN_S - 0.1) == is_out
    assert not out_of_turn({"a": 100.0, "d": 103.0}, 103.0 + DUE_AGAIN_S)
    # After two attempts that failed, whatever time it is.
    failed = Room("bcdx", reach=reach or dict.fromkeys("abcdx", 4)).schedule().turns
    failed.begin(head, 100.0, same_lineage=True)
    for _ in range(2):
        assert failed.is_out_of_turn("x", head, 100.0, "d")
        failed.note_failed()
    assert not failed.is_out_of_turn(leader, head, 100.0, "d")
    # While another one leads, and for some seconds after that.
    assert out_of_turn({"a": 100.0, "d": 100.0}, 1000.0, followed="d") == is_out


@pytest.mark.parametrize(
    ("voters", "barred"), [("ab", ""), ("abc", "c"), ("abcd", "c"), ("abcde", "bc"), ("abcdefg", "abc")]
)
def test_as_many_of_the_last_leaders_are_barred_as_are_fewer_than_half_of_the_voters(voters: str, barred: str) -> None:
    turns = Room(voters[1:]).schedule().turns
    for round_, leader in enumerate("abc"):
        turns.begin(led_by(leader, voters=voters, round_=round_), 100.0, same_lineage=True)
    head = led_by("c", voters=voters)
    assert "".join(name for name in voters if turns.is_out_of_turn(name, head, 100.0, None)) == barred


def test_dues_of_peers_that_do_not_vote_raise_no_counter() -> None:
    turns = begun(Room("bcxyz")).turns
    for sender in "xyz":
        assert turns.note_due(sender, Due("0-l", 5, 4), head_of(), 100.0)
    assert turns.counter == 0


def test_a_peer_leads_once_half_of_the_voters_are_due_and_it_is_its_turn() -> None:
    led = set()
    for counter in range(12):
        for name in "abc":
            turns = begun(Room()).turns
            turns._context.peer_id = name  # type: ignore[misc]
            turns.counter = counter
            assert not turns.is_ours(head_of(), 100.0)
            turns.note_due("b", Due("0-l", 5, 0), head_of(), 100.0)
            assert not turns.is_ours(head_of(), 100.0)
            turns.note_due("c", Due("0-l", 5, 0), head_of(), 100.0)
            if turns.is_ours(head_of(), 100.0):
                led.add((counter, name))
    assert len(led) == 12  # one leader of each attempt
    assert {name for _, name in led} == set("abc")


def test_a_leader_whose_attempts_fail_is_not_counted_for_a_while() -> None:
    turns = begun(Room("b")).turns
    for name in "ab":
        turns.note_due(name, Due("0-l", 5, 0), head_of(voters="ab"), 100.0)
    counters = range(20)

    def own(now: float) -> list[bool]:
        found = []
        for turns.counter in counters:
            found.append(turns.is_ours(head_of(voters="ab"), now))
        return found

    before = own(100.0)
    assert 0 < sum(before) < len(counters)
    turns.ignore("a", 100.0)
    assert own(100.0) == before
    turns.ignore("b", 100.0)
    assert all(own(100.0))  # its turns are ours
    assert own(100.0 + SILENT_LEADER_S) == before
