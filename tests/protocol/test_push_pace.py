"""The pace of pushes: gossip takes no more than its share of the cores."""

from __future__ import annotations

import math

import pytest

from p2ptrain.protocol.push_pace import FIXED_CPU_S, MOST_RECEIVED, WHOLE_FACTOR, PushPace, push_interval_s


def test_the_interval_is_the_cost_of_a_push_over_the_budget() -> None:
    whole_s = FIXED_CPU_S + WHOLE_FACTOR * 0.002
    assert push_interval_s(0.002, 0.02) == pytest.approx(whole_s / 0.02)
    assert push_interval_s(0.002, 1.0) == pytest.approx(whole_s)
    assert push_interval_s(0.002, math.inf) == 0.0


def pushes(pace: PushPace, *, cpu_s: float, step_s: float, steps: int) -> int:
    """Train some steps, pushing at each step at which a push is due and receiving as many. Returns the pushes."""
    sent = 0
    for step in range(steps):
        now = step * step_s
        if now >= pace.due_s:
            sent += 1
            pace.note_sent(cpu_s / 2, now)
            pace.note_received(cpu_s / 2)
    return sent


@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("step_s", [0.005, 0.07, 0.1])
def test_over_many_steps_gossip_takes_its_budget(budget: float, step_s: float) -> None:
    cpu_s = 0.01
    sent = pushes(PushPace(budget), cpu_s=cpu_s, step_s=step_s, steps=20_000)
    allowed = budget * 20_000 * step_s / (FIXED_CPU_S + WHOLE_FACTOR * cpu_s)
    assert sent == pytest.approx(allowed, abs=3)


def test_every_step_pushes_where_that_is_cheap() -> None:
    assert pushes(PushPace(0.06), cpu_s=0.0001, step_s=0.1, steps=500) == 500


def test_before_a_push_and_a_fragment_were_measured_every_step_pushes() -> None:
    pace = PushPace(0.001)
    pace.note_sent(1.0, 5.0)
    assert pace.due_s <= 5.0
    pace.note_received(1.0)
    pace.note_sent(1.0, 6.0)
    assert pace.due_s > 1000.0


def test_one_slow_push_changes_nothing() -> None:
    pace = PushPace(0.02)
    for step in range(10):
        pace.note_sent(0.001, float(step))
        pace.note_received(0.001)
    before_s = pace.interval_s
    pace.note_sent(5.0, 10.0)
    assert pace.interval_s == before_s


def test_fragments_of_others_do_not_silence_a_peer() -> None:
    few, many = PushPace(0.02), PushPace(0.02)
    for step in range(10):
        for pace, received in ((few, 1), (many, 50)):
            pace.note_sent(0.001, float(step))
            for _ in range(received):
                pace.note_received(0.002)
    assert few.interval_s == many.interval_s


def test_large_fragments_of_others_do_not_silence_a_peer() -> None:
    pace = PushPace(0.02)
    for step in range(20):
        pace.note_sent(0.001, float(step))
        pace.note_received(1.0)
    assert pace.interval_s == push_interval_s((1 + MOST_RECEIVED) * 0.001, 0.02)


def test_after_a_pause_one_push_is_made_up_for() -> None:
    pace = PushPace(0.02)
    pace.note_received(0.01)
    pace.note_sent(0.01, 0.0)
    pace.note_sent(0.01, 1000.0)
    assert pace.due_s <= 1000.0
    pace.note_sent(0.01, 1000.0)
    assert pace.due_s == pytest.approx(1000.0 + pace.interval_s)
