"""Whose turn it is to lead the next attempt, and whose Calls are followed; without links."""

from __future__ import annotations

import pytest

from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S
from p2ptrain.protocol.rounds.rotation import ANYBODY_AFTER_FAILED, DUE_AGAIN_S, MAX_DUE_AHEAD, LeaderRotation
from p2ptrain.protocol.wire.messages import Due
from tests.protocol.rounds.deciding.test_leading import led_by
from tests.protocol.rounds.fake_peer import DUE, FakePeer, head_of

# Of four voters b has led the last round, so it is barred; x does not vote.
HEAD = head_of(voters="abcd")


def rotation_of(peer: FakePeer, due: str = "", at_s: float = 100.0) -> LeaderRotation:
    peer.rotation.begin(HEAD, led_by("b"), same_lineage=True)
    for sender in due:
        peer.rotation.note_due(sender, DUE, HEAD, at_s)
    return peer.rotation


def test_dues_count_for_this_round_and_the_one_after_it_in_this_lineage() -> None:
    rotation, head = FakePeer().begin().rotation, head_of()
    taken = {round_: rotation.note_due("b", Due("0-l", round_, 0), head, 100.0) for round_ in range(3, 9)}
    assert taken == {3: False, 4: False, 5: True, 6: True, 7: False, 8: False}
    assert not rotation.note_due("b", Due("1-l", 5, 0), head, 100.0)
    assert rotation.due_for(head) == {"b"}


@pytest.mark.parametrize(
    ("voters", "present", "claims", "counter"),
    [
        ("abc", "b", {"b": 3}, 0),
        ("abc", "b", {"a": 3, "b": 99}, 3),
        ("abc", "bc", {"b": 3}, 0),
        ("abc", "bc", {"b": 3, "c": 5}, 3),
        ("abc", "bcd", {"b": 7, "c": 5, "d": 1}, 5),
        ("abc", "bcd", {"b": 99, "c": 98}, MAX_DUE_AHEAD),
        ("abc", "bcxyz", {"x": 4, "y": 4, "z": 4}, 0),  # strangers
        ("ab", "b", {"b": 3}, 3),
        ("ab", "bx", {"x": 5}, 0),
        ("ab", "bx", {"b": 3, "x": 5}, 3),
        ("a", "", {"a": 3}, 0),
    ],
)
def test_the_attempt_expected_next_is_what_half_of_the_voters_ask_for(
    voters: str, present: str, claims: dict[str, int], counter: int
) -> None:
    head = head_of(voters=voters)
    rotation = FakePeer(present).begin(head).rotation
    for sender, claim in claims.items():
        assert rotation.note_due(sender, Due("0-l", 5, claim), head, 100.0)
    rotation.note_due("b", Due("0-l", 6, 1000), head, 100.0)
    assert rotation.counter == counter


def test_the_counters_of_who_sends_too_many_dues_are_not_heard() -> None:
    head = head_of(voters="b")
    rotation = FakePeer("b").begin(head).rotation
    for number in range(100):
        rotation.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + 0.01 * number)
    assert rotation.counter == MAX_DUE_AHEAD
    rotation.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + DUE_AGAIN_S)
    assert rotation.counter == 2 * MAX_DUE_AHEAD


def test_a_new_head_forgets_dues_of_its_round_and_another_lineage_forgets_all() -> None:
    first, second = head_of(4, "a"), head_of(5, "a")
    for same_lineage, leads in ((True, True), (False, False)):
        rotation = FakePeer("").begin(first).rotation
        rotation.note_due("a", Due("0-l", 5, 0), first, 100.0)
        rotation.note_due("a", Due("0-l", 6, 0), first, 100.0)
        assert rotation.is_ours(first, 0, 100.0)
        rotation.begin(second, (), same_lineage=same_lineage)
        assert not rotation.is_ours(first, 0, 101.0)
        assert rotation.is_ours(second, 0, 101.0) == leads
        rotation.skip(6)
        assert not rotation.is_ours(second, 0, 101.0)


def test_a_peer_leads_once_half_of_the_voters_are_due_and_it_is_its_turn() -> None:
    head, led = head_of(), []
    for counter in range(12):
        for name in "abc":
            peer = FakePeer("abc".replace(name, ""), own=name).begin(head)
            peer.rotation.counter = counter
            assert not peer.rotation.is_ours(head, 0, 100.0)
            peer.rotation.note_due("b", DUE, head, 100.0)
            assert not peer.rotation.is_ours(head, 0, 100.0)
            peer.rotation.note_due("c", DUE, head, 100.0)
            if peer.rotation.is_ours(head, 0, 100.0):
                led.append((counter, name))
    assert [counter for counter, _ in led] == list(range(12))
    assert {name for _, name in led} == set("abc")


def test_until_half_of_the_voters_are_due_for_long_those_out_of_turn_are_not_followed() -> None:
    for leader, is_out in (("b", True), ("x", True), ("c", False)):
        rotation = rotation_of(FakePeer("bcdx"), "ax")
        assert rotation.is_out_of_turn(leader, HEAD, 0, 1000.0, None) == is_out
        rotation.note_due("d", DUE, HEAD, 1000.0)
        assert rotation.is_out_of_turn(leader, HEAD, 0, 1000.0 + DUE_AGAIN_S - 0.1, None) == is_out
        assert not rotation.is_out_of_turn(leader, HEAD, 0, 1000.0 + DUE_AGAIN_S, None)


def test_voters_that_are_gone_are_not_due() -> None:
    peer = FakePeer("bcdx")
    rotation = rotation_of(peer, "bc")
    peer.present = "cdx"
    assert rotation.is_out_of_turn("x", HEAD, 0, 1000.0, None)
    rotation.note_due("d", DUE, HEAD, 1000.0)
    assert rotation.is_out_of_turn("x", HEAD, 0, 1000.0 + DUE_AGAIN_S - 0.1, None)
    assert not rotation.is_out_of_turn("x", HEAD, 0, 1000.0 + DUE_AGAIN_S, None)


def test_while_a_voter_in_turn_leads_and_some_seconds_after_it_others_are_not_followed() -> None:
    """Whether or not they call meanwhile."""
    rotation = rotation_of(FakePeer("bcdx"), "ad")
    for leader in "bx":
        assert rotation.is_out_of_turn(leader, HEAD, 0, 1000.0, "c")
        assert not rotation.is_out_of_turn(leader, HEAD, 0, 1000.0, "b")
        assert not rotation.is_out_of_turn(leader, HEAD, 0, 1000.0, None)
    assert not rotation.is_out_of_turn("d", HEAD, 0, 1000.0, "c")
    rotation.note_ended("b", HEAD, 1000.0)
    rotation.note_ended("x", HEAD, 1000.0)
    assert not rotation.is_out_of_turn("x", HEAD, 0, 1000.0, None)
    rotation.note_ended("c", HEAD, 1000.0)
    for leader in "bx":
        assert rotation.is_out_of_turn(leader, HEAD, 0, 1000.0 + DUE_AGAIN_S - 0.1, None)
        assert not rotation.is_out_of_turn(leader, HEAD, 0, 1000.0 + DUE_AGAIN_S, None)


def test_after_attempts_that_failed_anybody_leads() -> None:
    rotation = rotation_of(FakePeer("bcdx"), "ad")
    for leader in "bx":
        assert rotation.is_out_of_turn(leader, HEAD, ANYBODY_AFTER_FAILED - 1, 100.0, "d")
        assert not rotation.is_out_of_turn(leader, HEAD, ANYBODY_AFTER_FAILED, 100.0, "d")


def test_a_leader_whose_attempts_fail_is_not_counted_for_a_while() -> None:
    head = head_of(voters="ab")
    rotation = FakePeer("b").begin(head).rotation
    for name in "ab":
        rotation.note_due(name, DUE, head, 100.0)

    def own(now: float) -> list[bool]:
        found = []
        for rotation.counter in range(20):
            found.append(rotation.is_ours(head, 0, now))
        return found

    before = own(100.0)
    assert 0 < sum(before) < 20
    rotation.ignore("a", 100.0)
    assert own(100.0) == before
    rotation.ignore("b", 100.0)
    assert all(own(100.0))  # its turns are ours
    assert own(100.0 + SILENT_LEADER_S) == before
    rotation.ignore("b", 200.0)
    rotation.forgive("b")
    assert own(200.0) == before
