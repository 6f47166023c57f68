import math

import numpy as np
import pytest

from p2ptrain.algorithms.schedules import (
    FRAGMENT_SCHEDULES,
    INTERVAL_SCHEDULES,
    fragment_rate,
    outer_lr_scale,
    scaled_interval,
    scheduled_interval,
)

# Midpoints of a thousand parts of a run: their mean is the mean over the run.
POSITIONS = (np.arange(1000) + 0.5) / 1000


@pytest.mark.parametrize("schedule", FRAGMENT_SCHEDULES)
def test_fragment_schedules_send_as_many_bytes_as_a_fixed_fraction(schedule: str) -> None:
    """Four intervals in a run."""
    rates = [fragment_rate(schedule, 4 * x % 1, x) for x in POSITIONS]
    assert np.mean(rates) == pytest.approx(1)
    assert 0 <= min(rates) <= max(rates) <= 2


def test_the_ramp_is_spartas_linear_schedule_in_every_interval() -> None:
    for progress in (0.0, 0.5, 1.0):
        assert [fragment_rate("ramp", x, progress) for x in (0.0, 0.25, 0.5, 1.0)] == [0, 0.5, 1, 2]


def test_the_decay_knows_only_the_run() -> None:
    for position in (0.0, 0.5, 1.0):
        assert [fragment_rate("decay", position, x) for x in (0.0, 0.25, 0.5, 1.0)] == [2, 1.5, 1, 0]


def test_positions_outside_the_run_count_as_its_ends() -> None:
    assert fragment_rate("ramp", 1.5, 0.5) == 2
    assert fragment_rate("decay", 0.5, 1.5) == 0
    assert fragment_rate("decay", 0.5, -1.0) == 2
    assert outer_lr_scale("cosine", 3.0) == pytest.approx(0)
    assert scheduled_interval("grow", 100, 7.0) == 150


@pytest.mark.parametrize("schedule", INTERVAL_SCHEDULES)
@pytest.mark.parametrize("sync_every", [1, 7, 500])
def test_the_mean_interval_is_h(schedule: str, sync_every: int) -> None:
    """Within the rounding to whole steps."""
    intervals = [scheduled_interval(schedule, sync_every, x) for x in POSITIONS]
    assert np.mean(intervals) == pytest.approx(sync_every, abs=0.01)
    assert min(intervals) >= 1


def test_intervals_go_from_one_end_to_the_other() -> None:
    assert [scheduled_interval("grow", 100, x) for x in (0, 0.5, 1)] == [50, 100, 150]
    assert [scheduled_interval("shrink", 100, x) for x in (0, 0.5, 1)] == [150, 100, 50]
    assert [scheduled_interval("fixed", 100, x) for x in (0, 0.5, 1)] == [100, 100, 100]


@pytest.mark.parametrize("schedule", INTERVAL_SCHEDULES)
def test_a_run_has_about_as_many_rounds_whatever_the_schedule(schedule: str) -> None:
    step, rounds = 0, 0
    while step < 100_000:
        step += scheduled_interval(schedule, 100, step / 100_000)
        rounds += 1
    assert 1000 <= rounds <= 1105


def test_a_constant_outer_lr_is_scaled_by_1_and_a_cosine_falls_to_0() -> None:
    assert [outer_lr_scale("constant", x) for x in (0, 0.3, 1)] == [1, 1, 1]
    assert [outer_lr_scale("cosine", x) for x in (0, 1 / 3, 0.5, 1)] == pytest.approx([1, 0.75, 0.5, 0])
    scales = [outer_lr_scale("cosine", x) for x in POSITIONS]
    assert scales == sorted(scales, reverse=True)
    assert np.mean(scales) == pytest.approx(0.5)


def test_an_unknown_schedule_is_a_defect_of_the_caller() -> None:
    for call in (
        outer_lr_scale,
        lambda name, x: fragment_rate(name, x, x),
        lambda name, x: scheduled_interval(name, 9, x),
    ):
        with pytest.raises(AssertionError):
            call("sawtooth", 0.5)


@pytest.mark.parametrize(
    ("speed", "median_speed", "interval"),
    [
        (10.0, 10.0, 200),
        (10.9, 10.0, 200),
        (9.1, 10.0, 200),
        (12.0, 10.0, 240),
        (5.0, 10.0, 100),
        (40.0, 10.0, 800),
        (0.001, 10.0, 1),
        (0.0, 10.0, 200),
        (10.0, 0.0, 200),
        (-1.0, 10.0, 200),
        (math.nan, 10.0, 200),
        (math.inf, 10.0, 200),
        (1e300, 1e-300, 200),
        (1.7e308, 1.0, 200),
    ],
)
def test_scaled_interval(speed: float, median_speed: float, interval: int) -> None:
    assert scaled_interval(200, speed, median_speed) == interval
