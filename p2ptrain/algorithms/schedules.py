"""Schedules: settings as functions of the position in a run or in an interval between rounds.

Pure functions, so peers that agree on the position agree on the value. Schedules of the fragment size have a mean of 1,
so that runs with and without a schedule send the same bytes. Positions beyond [0, 1] are clamped.
"""

from __future__ import annotations

import math

OUTER_LR_SCHEDULES = ("constant", "cosine")
FRAGMENT_SCHEDULES = ("fixed", "ramp", "decay")
INTERVAL_SCHEDULES = ("fixed", "grow", "shrink")

# Speeds within 10 % of the median are measurement noise; those peers keep H itself.
_SNAP = 0.1


def outer_lr_scale(schedule: str, progress: float) -> float:
    """Factor of the outer learning rate, at a share `progress` of the run.

    `schedule`: "constant", the paper's choice; or "cosine", from 1 to 0 over the run, which made no difference in the
    paper (DiLoCo, section 3.1, "Outer Optimizers").
    """
    assert schedule in OUTER_LR_SCHEDULES, schedule
    return 1.0 if schedule == "constant" else (1 + math.cos(math.pi * _unit(progress))) / 2


def fragment_rate(schedule: str, interval_position: float, progress: float) -> float:
    """Factor of SPARTA's fragment fraction p at this step, between 0 and 2; its mean is 1.

    Args:
        schedule: "fixed"; "ramp", from 0 to 2 over each interval between rounds (SPARTA, "linear schedule": peers are
            closer at the merge, the loss is the same); or "decay", from 2 to 0 over the run (an open question of the
            paper).
        interval_position: share of the interval since the last round that is over.
        progress: share of the run that is over.
    """
    assert schedule in FRAGMENT_SCHEDULES, schedule
    if schedule == "fixed":
        return 1.0
    return 2 * _unit(interval_position) if schedule == "ramp" else 2 * (1 - _unit(progress))


def scheduled_interval(schedule: str, sync_every: int, progress: float) -> int:
    """H, the inner steps until the next round, at least 1; its mean over the run's steps is `sync_every`.

    "grow" and "shrink" have ln 3 = 1.1 times as many rounds as "fixed", as there are more of the short intervals.

    Args:
        schedule: "fixed"; "grow", linear from half of `sync_every` to one and a half times it, because peers agree
            more and more on the direction; or "shrink", the reverse. An H schedule is an open question of SPARTA.
        sync_every: H of the run.
        progress: share of the run that is over.
    """
    assert schedule in INTERVAL_SCHEDULES, schedule
    if schedule == "fixed":
        return sync_every
    over = _unit(progress)
    return max(1, round(sync_every * (0.5 + over if schedule == "grow" else 1.5 - over)))


def scaled_interval(sync_every: int, speed: float, median_speed: float) -> int:
    """H_i, the inner steps of a peer between rounds: H · speed / median, so that all peers are ready together.

    At least 1; H itself if the speed is within 10 % of the median, or if a speed is unknown (not a positive number).

    Args:
        sync_every: H of the run, as scheduled.
        speed, median_speed: inner steps per second of this peer and of the roster's median.
    """
    ratio = speed / median_speed if median_speed > 0 else math.nan
    steps = sync_every * ratio
    if not 0 < steps < math.inf or abs(ratio - 1) <= _SNAP:
        return sync_every
    return max(1, round(steps))


def _unit(position: float) -> float:
    return min(1.0, max(0.0, position))
