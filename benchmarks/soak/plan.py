"""What will be done to whom and when, drawn from a seed before the soak begins."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("kill", "pause", "replace")
# A peer that was killed is down so long, a paused one asleep: shorter and longer than the ten seconds after which its
# links are given up.
DOWN_S = (3.0, 15.0)
ASLEEP_S = (2.0, 25.0)


@dataclass(frozen=True)
class Fault:
    """One fault, `at_s` after the storm began: "kill" is kill -9 and a restart with the same directory `lasts_s` later,
    "pause" is SIGSTOP and SIGCONT of the peer and its daemon, "replace" is SIGTERM and a new peer that joins."""

    at_s: float
    kind: str
    peer: int
    lasts_s: float


def plan_faults(*, seed: int, peers: int, minutes: float, per_minute: float) -> list[Fault]:
    """Faults at random times (exponential gaps) on peers from 0; the last peer is only ever paused.

    So that there is one whose memory can be watched from the beginning to the end. No peer suffers from two at once.
    """
    rng = random.Random(f"soak/{seed}")
    faults: list[Fault] = []
    free_from = [0.0] * peers
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_minute / 60)
        kind = rng.choice(KINDS)
        lasts_s = rng.uniform(*{"kill": DOWN_S, "pause": ASLEEP_S, "replace": (0.0, 5.0)}[kind])
        victims = range(peers if kind == "pause" else peers - 1)
        free = [peer for peer in victims if free_from[peer] <= at_s]
        if at_s + lasts_s > 60 * minutes:
            return faults
        if free:
            peer = rng.choice(free)
            # Whoever comes back has some time to join.
            free_from[peer] = at_s + lasts_s + 20
            faults.append(Fault(at_s, kind, peer, lasts_s))
