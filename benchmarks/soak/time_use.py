"""Where each second of a soak's peers goes: a peer's diary becomes spans without gaps, and their sum is all its time.

Nothing is measured for this in the peer: the diary has the events of its metrics file, the times at which its process
was started and stopped, and those of the files that it writes as it starts (`peers.SoakPeer`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# What a peer does from an entry of its diary on, until the next one. A peer that is asked to leave counts as down.
DOWN = "down, paused or leaving"
IMPORTING = "starting Python, importing torch and p2ptrain"
OPENING = "importing hivemind, opening the network (p2pd)"
FINDING = "finding the run, building model, data and optimizer"
JOINING = "joining: finding a member that has the state"
DOWNLOADING = "downloading the state"
FIRST_STEP = "evaluating until the first step"
# What is more than `step_s` from one step to the next. An exchange that fits into the pause of a paced step costs
# nothing.
BLOCKED = "blocked by exchanges"
EVALUATING = "evaluating later"
SLOWER = "slower steps, and checkpoints"
TRAINING = "training at the requested pace"
USES = (
    TRAINING, DOWN, IMPORTING, OPENING, FINDING, JOINING, DOWNLOADING, FIRST_STEP, BLOCKED, EVALUATING, SLOWER,
)  # fmt: skip
# Other entries: the end of a step, with the seconds for which its exchange blocked; the end of an evaluation.
STEP, EVALUATION = "step", "evaluation"
# Length of the longer bar of lost time.
BAR_LETTERS = 80
LETTERS = dict(zip(USES, "-diofjDebvs", strict=True))

# Time in seconds, what, and seconds.
Entry = tuple[float, str, float]


@dataclass
class Span:
    """Time between two entries, and the seconds of it by use."""

    start_s: float
    end_s: float
    parts: dict[str, float]


def spans(diary: Iterable[Entry], pauses: Sequence[tuple[float, float]], step_s: float) -> list[Span]:
    """The life of a peer from its first entry to its last one, without gaps.

    Args:
        diary: entries in any order; the first one is a use.
        pauses: from when to when the peer was paused.
        step_s: seconds of a step at the requested pace.
    """
    found: list[Span] = []
    (since_s, now, _), *later = sorted(diary)
    evaluated_s = 0.0
    for t, what, blocked_s in later:
        if what == EVALUATION:
            evaluated_s = t - since_s
            continue
        if what == STEP and now == DOWN:
            continue  # it has been asked to leave
        length_s = t - since_s
        asleep_s = sum(max(0.0, min(t, woke) - max(since_s, slept)) for slept, woke in pauses)
        parts = defaultdict(float, {DOWN: asleep_s})
        if now != TRAINING:
            parts[now] += length_s - asleep_s
        elif what != STEP:
            parts[DOWN] = length_s  # a kill loses the record of the last steps
        else:
            late_s = length_s - asleep_s - step_s
            if late_s < 0:
                _repay(found[-1].parts, -late_s)
            parts[BLOCKED] = max(0.0, min(late_s, blocked_s))
            parts[EVALUATING] = max(0.0, min(late_s - parts[BLOCKED], evaluated_s))
            parts[SLOWER] = max(0.0, late_s - parts[BLOCKED] - parts[EVALUATING])
            parts[TRAINING] = length_s - sum(parts.values())
        found.append(Span(since_s, t, parts))
        since_s, now, evaluated_s = t, TRAINING if what == STEP else what, 0.0
    return found


def _repay(parts: dict[str, float], early_s: float) -> None:
    """Take back from the step before what it was late: the pause after it was shorter, so nothing was lost."""
    for use in (SLOWER, EVALUATING, BLOCKED):
        taken_s = min(parts[use], early_s)
        parts[use] -= taken_s
        parts[TRAINING] += taken_s
        early_s -= taken_s


def shares(peers: Sequence[Sequence[Span]], start_s: float, end_s: float) -> dict[str, float]:
    """The share of each use in the time of all peers from `start_s` to `end_s`; the sum is 1."""
    seconds: dict[str, float] = defaultdict(float)
    for span in itertools.chain.from_iterable(peers):
        inside_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if inside_s > 0:
            for use, part_s in span.parts.items():
                seconds[use] += part_s * inside_s / (span.end_s - span.start_s)
    return {use: seconds[use] / (len(peers) * (end_s - start_s)) for use in USES}


def format_time_use(calm: dict[str, float], storm: dict[str, float], storm_s: float) -> str:
    """A table of the shares in the calm and in the storm, and a bar of what is lost; `storm_s`: of all peers."""
    lines = ["| where the time of the peers goes | in the bar | calm | storm | of it |", "|---|---|---|---|---|"]
    rows = [(use, LETTERS[use], calm[use], storm[use]) for use in USES]
    rows.append(("all", "", sum(calm.values()), sum(storm.values())))
    lines += [f"| {use} | {letter} | {c:.1%} | {s:.1%} | {s * storm_s:.1f} s |" for use, letter, c, s in rows]
    a_letter = max(1e-6, 1 - min(calm[TRAINING], storm[TRAINING])) / BAR_LETTERS
    bars = [
        f"    {name:6}" + "".join(LETTERS[use] * round(part[use] / a_letter) for use in USES if use != TRAINING)
        for name, part in (("calm", calm), ("storm", storm))
    ]
    return "\n".join([*lines, "", f"What is lost, a letter for {a_letter:.2%}:", "", *bars])
