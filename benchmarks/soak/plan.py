"""What will be done to whom and when, drawn from a seed before the soak begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "pause", "replace")
# Needs machines that can be cut off.
CUT = "cut"
# A peer that was killed is down so long, a paused one asleep: shorter and longer than the ten seconds after which its
# links are given up.
DOWN_S = (3.0, 15.0)
ASLEEP_S = (2.0, 25.0)
# Cut off: also longer than the minute after which those that lack a quorum begin a lineage of their own.
CUT_S = (3.0, 75.0)
MOST_CUT = 2
# Whoever comes back has some time to join.
BACK_S = 20.0


@dataclass(frozen=True)
class Fault:
    """One fault, `at_s` after the storm began: "kill" is kill -9 and a restart with the same directory `lasts_s` later,
    "pause" is SIGSTOP and SIGCONT of the peer and its daemon, "replace" is SIGTERM and a new peer that joins, "cut"
    parts one or two peers, which still reach each other, from all others. No fault but a cut has two `peers`."""

    at_s: float
    kind: str
    peers: tuple[int, ...]
    lasts_s: float


def plan_faults(
    *, seed: int, peers: int, minutes: float, per_minute: float, kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """Faults at random times (exponential gaps) on peers from 0; the last peer is only ever paused or cut off.

    So that there is one whose memory can be watched from the beginning to the end. No peer suffers from two at once,
    and one at least is always as it was: who joins finds the run.
    """
    rng = random.Random(f"soak/{seed}")
    lasts = {"kill": DOWN_S, "pause": ASLEEP_S, "replace": (0.0, 5.0), CUT: CUT_S}
    faults: list[Fault] = []
    free_from = [0.0] * peers
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_minute / 60)
        kind = rng.choice(kinds)
        lasts_s = rng.uniform(*lasts[kind])
        count = rng.randint(1, MOST_CUT) if kind == CUT else 1
        free = [peer for peer in range(peers) if free_from[peer] <= at_s]
        victims = [peer for peer in free if peer < peers - 1 or kind in ("pause", CUT)]
        if at_s > 60 * minutes:
            return faults
        fits = at_s + lasts_s <= 60 * minutes
        if fits and count < len(free) and count <= len(victims):
            struck = tuple(sorted(rng.sample(victims, count)))
            for peer in struck:
                free_from[peer] = at_s + lasts_s + BACK_S
            faults.append(Fault(at_s, kind, struck, lasts_s))
