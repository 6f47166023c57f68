"""The plan of a soak's faults, drawn from a seed before the soak begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "pause", "replace")
# Needs simulated machines.
CUT = "cut"
# Range of seconds that a killed peer is down, and that a paused one sleeps: shorter and longer than the ten seconds
# after which its links are closed.
DOWN_S = (3.0, 15.0)
ASLEEP_S = (2.0, 25.0)
# Range of seconds of a cut: also longer than the minute after which peers without a quorum begin a new lineage.
CUT_S = (3.0, 75.0)
MOST_CUT = 2
# A peer that comes back has this long to join before its next fault.
BACK_S = 20.0


@dataclass(frozen=True)
class Fault:
    """One fault, from `at_s` after the start of the storm for `lasts_s` seconds.

    "kill" is SIGKILL and a restart in the same directory, "pause" is SIGSTOP and SIGCONT of the peer and its daemon,
    "replace" is SIGTERM and a new peer that joins, "cut" disconnects one or two peers from all others, not from each
    other. Only a cut can have two `peers`.
    """

    at_s: float
    kind: str
    peers: tuple[int, ...]
    lasts_s: float


def plan_faults(
    *, seed: int, peers: int, minutes: float, per_minute: float, kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """Draw faults at random times (exponential gaps). Peers are numbered from 0.

    The last peer is only paused or cut off, so that one process can be checked for leaks from start to end. No peer has
    two faults at once, and at least one peer always has none, so that joining peers find the run.
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
