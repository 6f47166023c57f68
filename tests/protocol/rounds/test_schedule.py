"""When a peer is due, whom it calls, and for which peers a round waits; without links."""

from __future__ import annotations

import pytest

from p2ptrain.protocol.rounds.rotation import DUE_AGAIN_S
from p2ptrain.protocol.rounds.schedule import (
    FOLLOWERS_PATIENCE_S,
    FOLLOWING_PATIENCE_S,
    JOIN_GRACE_S,
    JOINERS_PATIENCE_S,
    LEADER_DELAY_S,
    MEMBERS_PATIENCE_S,
    OVERTAKEN_S,
)
from p2ptrain.protocol.wire.messages import Due
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.fake_peer import DUE, PAIRWISE, FakePeer, head_of

# --- being due ---------------------------------------------------------------------------------------------------


def test_a_due_is_sent_at_once_and_again_every_three_seconds_for_the_next_attempt() -> None:
    schedule = FakePeer().begin().schedule
    assert schedule.due(head_of(), 0, 100.0, again=True) == Due("0-l", 5, 0)
    assert schedule.due(head_of(), 0, 100.0 + DUE_AGAIN_S, again=True) is None
    assert schedule.due(head_of(), 0, 100.1 + DUE_AGAIN_S, again=True) == Due("0-l", 5, 1)
    # In an attempt only once.
    assert schedule.due(head_of(), 0, 100.2 + 2 * DUE_AGAIN_S, again=False) is None
    # After a failed attempt, or in another round, at once.
    assert schedule.due(head_of(), 1, 103.5, again=True) == Due("0-l", 5, 1)
    assert schedule.due(head_of(5), 1, 103.6, again=False) == Due("0-l", 6, 1)
    assert FakePeer(due=False).begin().schedule.due(head_of(), 0, 100.0, again=True) is None


# --- waiting for others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "is_landing", "wait_s"),
    [
        (FakePeer(), False, 0.0),
        (FakePeer(), True, OVERTAKEN_S),
        (FakePeer(due=False), True, 0.0),
        (FakePeer(at_length=True), True, 0.0),
        (FakePeer(joiners={"x": 0}), False, 0.0),
        (FakePeer(joiners={"x": 1, "y": 0}), False, OVERTAKEN_S),
        (FakePeer(joiners={"x": 2}), False, 2 * OVERTAKEN_S),
        (FakePeer(joiners={"x": 3}), False, 4 * OVERTAKEN_S),
        (FakePeer(joiners={"x": 9}), False, 60.0),
        (FakePeer(joiners={"x": 0}, alone=True), False, JOINERS_PATIENCE_S),
        (FakePeer(joiners={"x": 1}, at_length=True), False, 0.0),
        (FakePeer("", run=PAIRWISE, linked="b", at_length=True), False, FOLLOWERS_PATIENCE_S),
        (FakePeer("", run=PAIRWISE, linked="", at_length=True), False, 0.0),
        (FakePeer("b", run=PAIRWISE, at_length=True), False, 0.0),
        (FakePeer("", linked="b", at_length=True), False, 0.0),
        (FakePeer("", linked="b", lineage="0-before", at_length=True), False, OVERTAKEN_S),
        (FakePeer("", linked="b", lineage="0-before"), False, OVERTAKEN_S),
        (FakePeer("", linked="b", lineage=""), False, 0.0),
        # Its only voter waits until others have landed the last round.
        (FakePeer("", rounds={"b": 3}), False, 60.0),
        (FakePeer("", rounds={"b": 2, "c": 4}), False, 0.0),
    ],
)
def test_a_round_waits_for_peers_that_it_would_overtake(peer: FakePeer, is_landing: bool, wait_s: float) -> None:
    head, due = head_of(voters="a" + peer.present), peer.due
    schedule = peer.begin(head).schedule
    # Since when we are due: only while we are not, it moves on.
    peer.due = False
    schedule.note_time(100.0)
    peer.due = due
    schedule.note_time(101.0)
    for late_s, waits in ((0.0, wait_s > 0), (wait_s - 0.1, wait_s > 0), (wait_s, False)):
        assert schedule.waits(head, 100.0 + late_s, is_landing=is_landing) == waits


@pytest.mark.parametrize("due_s", [100.0, 5000.0])
def test_only_a_first_round_is_held_back_and_not_for_ever(due_s: float) -> None:
    """From the time at which it is due: an interval may be longer than the patience."""
    first = head_of(round_=-1)
    peer = FakePeer(due=False).begin(first)
    schedule = peer.schedule
    schedule.note_time(due_s)
    peer.due = True
    assert schedule.may_hold_back(first, due_s + FOLLOWING_PATIENCE_S - 0.1)
    assert not schedule.may_hold_back(first, due_s + FOLLOWING_PATIENCE_S)
    assert not schedule.may_hold_back(head_of(), due_s)
    assert not FakePeer(run=PAIRWISE).schedule.may_hold_back(first, 0.0)


# --- leading -----------------------------------------------------------------------------------------------------


def test_the_last_round_of_random_pairs_waits_for_half_of_the_members() -> None:
    head = head_of(voters="a")
    peer = FakePeer("bcd", run=PAIRWISE, due=False).begin(head)
    peer.schedule.note_time(100.0)
    peer.due = True
    for name in "ax":  # x is not linked
        peer.rotation.note_due(name, DUE, head, 100.0)
    assert not peer.schedule.is_ours_to_lead(head, 0, 99.9 + MEMBERS_PATIENCE_S)
    assert peer.schedule.is_ours_to_lead(head, 0, 100.0 + MEMBERS_PATIENCE_S)
    peer.rotation.note_due("b", DUE, head, 100.0)
    assert peer.schedule.is_ours_to_lead(head, 0, 100.0)


def test_voters_and_the_drawn_are_called_with_a_window_that_doubles_twice() -> None:
    run = RunConfig(sync_every=100, max_contributors=2)
    peer = FakePeer("bcdefgh", run=run, round_trip_s=0.4).begin()
    peer.rotation.counter, schedule = 7, peer.schedule
    leads = [schedule.lead(head_of(voters="abcx"), failed, 100.0) for failed in range(5)]
    assert [lead.window_s / leads[0].window_s for lead in leads] == [1, 2, 4, 4, 4]
    assert {lead.grace_s for lead in leads} == {0.8}
    assert {lead.counter for lead in leads} == {7}
    assert {frozenset(lead.called) for lead in leads} == {frozenset(leads[0].called)}
    assert set("abc") <= set(leads[0].called) <= set("abcdefgh")
    assert len(leads[0].called) <= 5
    assert FakePeer().begin().schedule.lead(head_of(), 0, 100.0).grace_s == JOIN_GRACE_S


def test_after_its_attempt_a_leader_waits_a_moment_and_gives_the_next_one_more_time() -> None:
    schedule = FakePeer().begin().schedule
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
    schedule = FakePeer(step_s=step_s, speeds=speeds).begin().schedule
    schedule.lead(head_of(), 0, 100.0)
    for delay_s in delays_s:
        schedule.note_join(100.0 + delay_s)
    assert schedule.window_s() == pytest.approx(window_s)
