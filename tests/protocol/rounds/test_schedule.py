"""When a peer is due, when it leads, whom it calls, and for which peers a round waits; without links."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_LEADER_S, Timeouts
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.rounds.schedule import (
    DUE_AGAIN_S,
    FOLLOWERS_PATIENCE_S,
    FOLLOWING_PATIENCE_S,
    JOIN_GRACE_S,
    JOINERS_PATIENCE_S,
    LEADER_DELAY_S,
    MAX_DUE_AHEAD,
    MEMBERS_PATIENCE_S,
    OVERTAKEN_S,
    Schedule,
    leader_of,
)
from p2ptrain.protocol.wire.messages import Attempt, Commit, Due, Head
from p2ptrain.settings.config import RunConfig
from tests.protocol.signing import record_after

PAIRWISE = RunConfig(averaging="pairwise", outer_optimizer="sgdm")


def head_of(round_: int = 4, voters: str = "abc", lineage: str = "0-l") -> Head:
    return Head("0-g", lineage, round_, "state", "anchor", tuple((name, f"{name}.1") for name in voters), 0, 0, None)


@dataclass
class Room:
    """The part of a peer "a" that its schedule reads."""

    peers: str = "bc"
    run: RunConfig = field(default_factory=lambda: RunConfig(sync_every=100))
    joiners: dict[str, int] = field(default_factory=dict)
    alone: bool = False
    due: bool = True
    at_length: bool = False
    linked: str | None = None  # in any lineage, such as the next
    lineage: str = "0-l"
    step_s: float = 0.1
    round_trip_s: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)

    def schedule(self) -> Schedule:
        present: set[Voter] = {(name, f"{name}.1") for name in "a" + self.peers}
        context: Any = SimpleNamespace(
            peer_id="a", run=self.run, timeouts=Timeouts(peer_timeout_s=30.0, round_timeout_s=600.0),
            exchange=SimpleNamespace(round_due=self.due, at_length=self.at_length, step_s=self.step_s),
            host=SimpleNamespace(lineage_peers=lambda: tuple(self.peers), joiners=lambda: self.joiners),
            links=SimpleNamespace(
                trainers=lambda: [
                    SimpleNamespace(beat=SimpleNamespace(lineage=self.lineage, round=4))
                    for _ in (self.peers if self.linked is None else self.linked)
                ]
            ),
            liveness=SimpleNamespace(
                present=lambda: present, is_alone=lambda head: self.alone, round_trip_s=lambda: self.round_trip_s,
                beats=lambda: {name: SimpleNamespace(speed=speed) for name, speed in self.speeds.items()},
                reaches=lambda head: self.reach or dict.fromkeys("a" + self.peers, 3),
            ),
        )  # fmt: skip
        return Schedule(context, random.Random(0))


def begun(room: Room, now: float = 100.0) -> Schedule:
    schedule = room.schedule()
    schedule.begin(head_of(), now, same_lineage=False)
    return schedule


# --- being due ---------------------------------------------------------------------------------------------------


def test_a_due_is_sent_at_once_and_again_every_three_seconds_for_the_next_attempt() -> None:
    schedule = begun(Room())
    assert schedule.due(head_of(), 0, 100.0) == Due("0-l", 5, 0)
    assert schedule.due(head_of(), 0, 100.0 + DUE_AGAIN_S) is None
    assert schedule.due(head_of(), 0, 100.1 + DUE_AGAIN_S) == Due("0-l", 5, 1)
    # After a failed attempt, or in another round, at once.
    assert schedule.due(head_of(), 1, 103.5) == Due("0-l", 5, 1)
    assert schedule.due(head_of(5), 1, 103.6) == Due("0-l", 6, 1)
    assert begun(Room(due=False)).due(head_of(), 0, 100.0) is None


def test_dues_count_for_this_round_and_the_one_after_it_in_this_lineage() -> None:
    schedule = begun(Room())
    head = head_of()
    taken = {round_: schedule.note_due("b", Due("0-l", round_, 0), head, 100.0) for round_ in range(3, 9)}
    assert taken == {3: False, 4: False, 5: True, 6: True, 7: False, 8: False}
    assert not schedule.note_due("b", Due("1-l", 5, 0), head, 100.0)


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
    schedule = begun(Room(peers))
    for sender, claim in claims.items():
        assert schedule.note_due(sender, Due("0-l", 5, claim), head_of(), 100.0)
    schedule.note_due("b", Due("0-l", 6, 1000), head_of(), 100.0)
    assert schedule.counter == counter


def test_the_counters_of_who_sends_too_many_dues_are_not_heard() -> None:
    schedule, head = begun(Room("b")), head_of(voters="b")
    for number in range(100):
        schedule.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + 0.01 * number)
    assert schedule.counter == MAX_DUE_AHEAD
    schedule.note_due("b", Due("0-l", 5, 10**6), head, 100.0 + DUE_AGAIN_S)
    assert schedule.counter == 2 * MAX_DUE_AHEAD


def test_a_new_head_forgets_dues_of_its_round_and_another_lineage_forgets_all() -> None:
    for same_lineage, leads in ((True, True), (False, False)):
        schedule = begun(Room("", run=RunConfig()))
        schedule.note_due("a", Due("0-l", 5, 0), head_of(voters="a"), 100.0)
        schedule.note_due("a", Due("0-l", 6, 0), head_of(voters="a"), 100.0)
        assert schedule.is_ours_to_lead(head_of(voters="a"), 100.0)
        schedule.begin(head_of(5, "a"), 101.0, same_lineage=same_lineage)
        assert not schedule.is_ours_to_lead(head_of(4, "a"), 101.0)
        assert schedule.is_ours_to_lead(head_of(5, "a"), 101.0) == leads
        schedule.skip(6)
        assert not schedule.is_ours_to_lead(head_of(5, "a"), 101.0)


# --- whose turn it is -----------------------------------------------------------------------------------------------


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
        schedule = Room("bcdx", reach=reach or dict.fromkeys("abcdx", 4)).schedule()
        schedule.begin(head, 100.0, same_lineage=True)
        for sender, at_s in due_s.items():
            schedule.note_due(sender, Due("0-l", 5, 0), head, at_s)
        for peer in ignored:
            schedule.ignore(peer, now)
        if followed is not None:
            assert schedule.is_out_of_turn(leader, head, now - 0.1, followed) == (leader != "c")
        return schedule.is_out_of_turn(leader, head, now, None)

    assert out_of_turn({"a": 100.0, "x": 100.0}, 1000.0) == is_out
    assert out_of_turn({"a": 100.0, "d": 103.0}, 103.0 + DUE_AGAIN_S - 0.1) == is_out
    assert not out_of_turn({"a": 100.0, "d": 103.0}, 103.0 + DUE_AGAIN_S)
    # After two attempts that failed, whatever time it is.
    failed = Room("bcdx", reach=reach or dict.fromkeys("abcdx", 4)).schedule()
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
    schedule = Room(voters[1:]).schedule()
    for round_, leader in enumerate("abc"):
        schedule.begin(led_by(leader, voters=voters, round_=round_), 100.0, same_lineage=True)
    schedule.note_time(100.0)
    head = led_by("c", voters=voters)
    assert "".join(name for name in voters if schedule.is_out_of_turn(name, head, 100.0, None)) == barred


def test_dues_of_peers_that_do_not_vote_raise_no_counter() -> None:
    schedule = begun(Room("bcxyz"))
    for sender in "xyz":
        assert schedule.note_due(sender, Due("0-l", 5, 4), head_of(), 100.0)
    assert schedule.counter == 0


# --- waiting for others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "is_landing", "wait_s"),
    [
        (Room(), False, 0.0),
        (Room(), True, OVERTAKEN_S),
        (Room(due=False), True, 0.0),
        (Room(at_length=True), True, 0.0),
        (Room(joiners={"x": 0}), False, 0.0),
        (Room(joiners={"x": 1, "y": 0}), False, OVERTAKEN_S),
        (Room(joiners={"x": 2}), False, 2 * OVERTAKEN_S),
        (Room(joiners={"x": 3}), False, 4 * OVERTAKEN_S),
        (Room(joiners={"x": 9}), False, 60.0),
        (Room(joiners={"x": 0}, alone=True), False, JOINERS_PATIENCE_S),
        (Room(joiners={"x": 1}, at_length=True), False, 0.0),
        (Room("", run=PAIRWISE, linked="b", at_length=True), False, FOLLOWERS_PATIENCE_S),
        (Room("", run=PAIRWISE, linked="", at_length=True), False, 0.0),
        (Room("b", run=PAIRWISE, at_length=True), False, 0.0),
        (Room("", linked="b", at_length=True), False, 0.0),
        (Room("", linked="b", lineage="0-before", at_length=True), False, OVERTAKEN_S),
        (Room("", linked="b", lineage="0-before"), False, OVERTAKEN_S),
        (Room("", linked="b", lineage=""), False, 0.0),
    ],
)
def test_a_round_waits_for_peers_that_it_would_overtake(room: Room, is_landing: bool, wait_s: float) -> None:
    schedule, head = room.schedule(), head_of(voters="a" + room.peers)
    # Since when we are due: only while we are not, it moves on.
    schedule._context.exchange.round_due = False  # type: ignore[misc]
    schedule.note_time(100.0)
    schedule._context.exchange.round_due = room.due  # type: ignore[misc]
    schedule.note_time(101.0)
    schedule.begin(head, 100.0, same_lineage=False)
    for late_s, waits in ((0.0, wait_s > 0), (wait_s - 0.1, wait_s > 0), (wait_s, False)):
        assert schedule.waits(head, 100.0 + late_s, is_landing=is_landing) == waits


@pytest.mark.parametrize("due_s", [100.0, 5000.0])
def test_only_a_first_round_is_held_back_and_not_for_ever(due_s: float) -> None:
    """From the time at which it is due: an interval may be longer than the patience."""
    schedule, first = Room().schedule(), head_of(round_=-1)
    schedule.begin(first, 100.0, same_lineage=False)
    schedule._context.exchange.round_due = False  # type: ignore[misc]
    schedule.note_time(due_s)
    schedule._context.exchange.round_due = True  # type: ignore[misc]
    assert schedule.may_hold_back(first, due_s + FOLLOWING_PATIENCE_S - 0.1)
    assert not schedule.may_hold_back(first, due_s + FOLLOWING_PATIENCE_S)
    assert not schedule.may_hold_back(head_of(), due_s)
    assert not Room(run=PAIRWISE).schedule().may_hold_back(first, 0.0)


# --- leading -----------------------------------------------------------------------------------------------------


def test_a_peer_leads_once_half_of_the_voters_are_due_and_it_is_its_turn() -> None:
    led = set()
    for counter in range(12):
        for name in "abc":
            schedule = begun(Room())
            schedule._context.peer_id = name  # type: ignore[misc]
            schedule.counter = counter
            assert not schedule.is_ours_to_lead(head_of(), 100.0)
            schedule.note_due("b", Due("0-l", 5, 0), head_of(), 100.0)
            assert not schedule.is_ours_to_lead(head_of(), 100.0)
            schedule.note_due("c", Due("0-l", 5, 0), head_of(), 100.0)
            if schedule.is_ours_to_lead(head_of(), 100.0):
                led.add((counter, name))
    assert len(led) == 12  # one leader of each attempt
    assert {name for _, name in led} == set("abc")


def test_a_leader_whose_attempts_fail_is_not_counted_for_a_while() -> None:
    schedule = begun(Room("b"))
    for name in "ab":
        schedule.note_due(name, Due("0-l", 5, 0), head_of(voters="ab"), 100.0)
    turns = range(20)

    def own(now: float) -> list[bool]:
        found = []
        for schedule.counter in turns:
            found.append(schedule.is_ours_to_lead(head_of(voters="ab"), now))
        return found

    before = own(100.0)
    assert 0 < sum(before) < len(turns)
    schedule.ignore("a", 100.0)
    assert own(100.0) == before
    schedule.ignore("b", 100.0)
    assert all(own(100.0))  # its turns are ours
    assert own(100.0 + SILENT_LEADER_S) == before


def test_the_last_round_of_random_pairs_waits_for_half_of_the_members() -> None:
    room = Room("bcd", run=PAIRWISE)
    schedule = room.schedule()
    schedule.begin(head_of(voters="a"), 100.0, same_lineage=False)
    schedule._context.exchange.round_due = False  # type: ignore[misc]
    schedule.note_time(100.0)
    schedule._context.exchange.round_due = True  # type: ignore[misc]
    schedule.note_due("a", Due("0-l", 5, 0), head_of(voters="a"), 100.0)
    assert not schedule.is_ours_to_lead(head_of(voters="a"), 99.9 + MEMBERS_PATIENCE_S)
    assert schedule.is_ours_to_lead(head_of(voters="a"), 100.0 + MEMBERS_PATIENCE_S)
    schedule.note_due("b", Due("0-l", 5, 0), head_of(voters="a"), 100.0)
    assert schedule.is_ours_to_lead(head_of(voters="a"), 100.0)


def test_voters_and_the_drawn_are_called_with_a_window_that_doubles_twice() -> None:
    room = Room("bcdefgh", run=RunConfig(sync_every=100, max_contributors=2), round_trip_s=0.4)
    schedule = begun(room)
    schedule.counter = 7
    leads = [schedule.lead(head_of(voters="abcx"), failed, 100.0) for failed in range(5)]
    assert [lead.window_s / leads[0].window_s for lead in leads] == [1, 2, 4, 4, 4]
    assert {lead.grace_s for lead in leads} == {0.8}
    assert {lead.counter for lead in leads} == {7}
    assert {frozenset(lead.called) for lead in leads} == {frozenset(leads[0].called)}
    assert set("abc") <= set(leads[0].called) <= set("abcdefgh")
    assert len(leads[0].called) <= 5
    assert begun(Room()).lead(head_of(), 0, 100.0).grace_s == JOIN_GRACE_S


def test_after_its_attempt_a_leader_waits_a_moment_and_gives_the_next_one_more_time() -> None:
    schedule = begun(Room())
    assert schedule.delay_s(100.0) == 0.0
    schedule.lead(head_of(), 0, 100.0)
    schedule.note_led(120.0, timed_out=False)
    assert LEADER_DELAY_S[0] <= schedule.delay_s(120.0) <= LEADER_DELAY_S[1]
    assert schedule.delay_s(121.0) == 0.0
    schedule._context.timeouts.note_round(30.0)
    schedule.note_led(160.0, timed_out=False)
    assert schedule._context.timeouts.attempt_s() == 90.0
    schedule.note_led(160.0, timed_out=True)
    assert schedule._context.timeouts.attempt_s() == 180.0


@pytest.mark.parametrize(
    ("step_s", "delays_s", "speeds", "window_s"),
    [
        (0.01, [], {}, 1.0),  # a tenth of the interval of 1 s is less than the least
        (0.1, [], {}, 1.0),
        (0.2, [], {}, 2.0),  # before the first Join, a tenth of the interval
        (0.2, [0.1], {}, 1.0),
        (0.2, [0.1, 0.8, 0.2], {}, 1.2),
        (0.2, [5.0], {}, 2.0),
        (0.2, [0.1], {"b": 1.25, "c": 5.0, "d": 0.0}, 2.0),  # two and a half steps of the slowest
        (0.2, [0.1], {"b": 0.01}, 2.0),  # which count as at most four of ours
        (1.0, [0.1], {"b": 10.0}, 2.5),
    ],
)
def test_the_window_follows_the_delays_of_joins(
    step_s: float, delays_s: list[float], speeds: dict[str, float], window_s: float
) -> None:
    schedule = begun(Room(step_s=step_s, speeds=speeds))
    schedule.lead(head_of(), 0, 100.0)
    for delay_s in delays_s:
        schedule.note_join(100.0 + delay_s)
    assert schedule.window_s() == pytest.approx(window_s)
