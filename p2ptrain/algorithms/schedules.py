"""How settings change with the position in a run or in an interval. Pure functions: peers that agree on the position
agree on the value.

Schedules of what is sent have a mean of 1 over what they span, so that runs with and without one send the same bytes.
"""

from __future__ import annotations

import math

OUTER_LR_SCHEDULES = ("constant", "cosine")
FRAGMENT_SCHEDULES = ("fixed", "ramp", "decay")
INTERVAL_SCHEDULES = ("fixed", "grow", "shrink")

# Speeds within 10 % of the median are noise of the measurement: those peers keep H itself.
_SNAP = 0.1


def outer_lr_scale(schedule: str, progress: float) -> float:
    """What the outer learning rate is multiplied by.

    Args:
        schedule: "constant", the paper's choice; or "cosine", from 1 to 0 over the run, which changed nothing there
            (DiLoCo, section 3.1, "Outer Optimizers").
        progress: share of the run that is over, in [0, 1]; beyond, the nearer end counts.
    """
    assert schedule in OUTER_LR_SCHEDULES, schedule
    return 1.0 if schedule == "constant" else (1 + math.cos(math.pi * _unit(progress))) / 2


def fragment_rate(schedule: str, interval_position: float, progress: float) -> float:
    """What SPARTA's fragment fraction p is multiplied by at this step; its mean is 1.

    Args:
        schedule: "fixed"; "ramp", from 0 to 2 over each interval between rounds (SPARTA, "linear schedule": nearer
            peers at the merge, the same loss); or "decay", from 2 to 0 over the run (the paper's open question).
        interval_position: share of the interval since the last round that is over, in [0, 1].
        progress: share of the run that is over, in [0, 1]. Beyond it, as beyond the interval, the nearer end counts.

    Returns:
        Between 0 and 2.
    """
    assert schedule in FRAGMENT_SCHEDULES, schedule
    if schedule == "fixed":
        return 1.0
    return 2 * _unit(interval_position) if schedule == "ramp" else 2 * (1 - _unit(progress))


def scheduled_interval(schedule: str, sync_every: int, progress: float) -> int:
    """H, the inner steps until the next round: `sync_every` on the mean over the run's steps.

    The number of rounds is that of "fixed" within 10 %: ln 3 = 1.1 times as many, since short intervals are many.

    Args:
        schedule: "fixed"; "grow", linear from half of `sync_every` to one and a half times it, as peers agree ever more
            on where to go; or "shrink", the reverse. Both are SPARTA's open question of an H schedule.
        sync_every: H of the run.
        progress: share of the run that is over, in [0, 1]; beyond, the nearer end counts.

    Returns:
        At least 1.
    """
    assert schedule in INTERVAL_SCHEDULES, schedule
    if schedule == "fixed":
        return sync_every
    over = _unit(progress)
    return max(1, round(sync_every * (0.5 + over if schedule == "grow" else 1.5 - over)))


def scaled_interval(sync_every: int, speed: float, median_speed: float) -> int:
    """H_i, the inner steps a peer takes between rounds: H · speed / median, so that all arrive together.

    Args:
        sync_every: H of the run, as scheduled.
        speed, median_speed: inner steps per second of this peer and of the roster's median.

    Returns:
        At least 1; H itself when the speed is within 10 % of the median, or when a speed is not known (not a positive
        number).
    """
    ratio = speed / median_speed if median_speed > 0 else math.nan
    if not 0 < ratio < math.inf or abs(ratio - 1) <= _SNAP:
        return sync_every
    return max(1, round(sync_every * ratio))


def _unit(position: float) -> float:
    return min(1.0, max(0.0, position))
