"""Progress lines: speed without evaluations, and a time left that does not jump."""

from __future__ import annotations

import pytest

from p2ptrain.training.progress import Pace, time_left_s

# Each step takes 0.1 s, each evaluation 2 s.
STEP_S, EVAL_S, EVAL_EVERY, TOTAL = 0.1, 2.0, 100, 1000


def _left(pace: Pace, run_step: int, eval_s: float = EVAL_S) -> float | None:
    return time_left_s(pace, run_step, TOTAL, eval_every=EVAL_EVERY, eval_s=eval_s)


def test_the_time_left_is_exact_when_nothing_changes() -> None:
    pace, step = Pace(200), 0
    for line in range(1, 20):
        pace, step = pace.after(50, 50 * STEP_S), step + 50
        evaluations = 11 - step // EVAL_EVERY  # with the last one, after the last round
        assert _left(pace, step) == pytest.approx(STEP_S * (TOTAL - step) + EVAL_S * evaluations), line


def test_the_time_left_changes_little_where_rounds_move_a_slow_peer_ahead() -> None:
    """It makes half of the steps by itself, and each round gives it the other half at once."""
    pace, lefts = Pace(200), []
    for line in range(40):
        pace = pace.after(10 + (50 if line % 5 == 4 else 0), 10 * 2 * STEP_S)
        lefts.append(_left(pace, 0, eval_s=0.0) or 0.0)
    assert lefts[-5:] == pytest.approx([STEP_S * TOTAL] * 5, rel=0.2)


def test_a_change_of_speed_is_noticed_after_a_few_rounds() -> None:
    pace = Pace(200)
    for seconds in (1.0,) * 40 + (3.0,) * 80:
        pace = pace.after(10, seconds)
    assert pace.step_s == pytest.approx(0.3, rel=0.02)


def test_without_an_end_or_a_step_ahead_the_time_is_not_known() -> None:
    assert time_left_s(Pace(200).after(5, 1.0), 5, 0, eval_every=100, eval_s=1.0) is None
    assert _left(Pace(200), 0) is None
    assert _left(Pace(200).after(10, 1.0).after(-50, 1.0), 0) is None
    assert _left(Pace(200).after(1100, 110.0), 1100) == pytest.approx(0.0)
