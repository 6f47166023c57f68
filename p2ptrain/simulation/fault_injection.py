"""Random faults at a given rate, each undone after a while.

All faults are drawn from the experiment's seed before the run, as scheduled events.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from p2ptrain.simulation.scheduled_event import ScheduledEvent

KINDS = ("crash", "pause", "partition", "slow")
# The slowest link that is supported.
SLOW_MBIT = 2.0


@dataclass(frozen=True)
class Fault:
    """One fault of some peers, between two steps of the run. `number` counts from 1."""

    number: int
    kind: str
    peers: tuple[int, ...]
    begins: int
    ends: int

    @property
    def scheduled_events(self) -> Iterator[ScheduledEvent]:
        """The actions on each peer, and those that undo them."""
        for peer in self.peers:
            if self.kind == "crash":
                yield ScheduledEvent(self.begins, "crash", peer)
                yield ScheduledEvent(self.ends, "join", peer)
            if self.kind == "pause":
                yield ScheduledEvent(self.begins, "pause", peer)
                yield ScheduledEvent(self.ends, "resume", peer)
            if self.kind in ("pause", "partition"):
                yield ScheduledEvent(self.begins, "cut", peer, self.number)
                yield ScheduledEvent(self.ends, "mend", peer)
            if self.kind == "slow":
                yield ScheduledEvent(self.begins, "narrow", peer, SLOW_MBIT)
                yield ScheduledEvent(self.ends, "widen", peer)


def draw_faults(
    *, peers: int, kinds: tuple[str, ...], faults_per_hour: float, fault_s: float, step_s: float, steps: int, seed: int
) -> tuple[Fault, ...]:
    """All faults of a run, ordered by their start.

    All kinds are equally likely. "crash": the peer vanishes and later starts anew, without its state. "pause": training
    and network stop and resume. "partition": up to half of the peers can reach only each other. "slow": a link of
    2 Mbit/s both ways. A peer has one fault at a time, and at most half of the peers have one at once; larger faults
    are left out or affect fewer peers.

    Args:
        peers: number of peers.
        kinds: allowed kinds, of KINDS.
        faults_per_hour: rate in virtual time, for all peers together; times between faults are exponential.
        fault_s: mean duration in virtual seconds; durations range from 0.5 to 1.5 of it.
        step_s: virtual seconds per step.
        steps: all faults end before this step.
        seed: random seed.
    """
    rng = random.Random(f"storm/{seed}")
    faults: list[Fault] = []
    free_from = [0] * peers
    time_s = 0.0
    while faults_per_hour > 0:
        time_s += rng.expovariate(faults_per_hour / 3600)
        kind, lasts_s = rng.choice(kinds), fault_s * rng.uniform(0.5, 1.5)
        begins, ends = round(time_s / step_s), round((time_s + lasts_s) / step_s) + 1
        if begins >= steps:
            break
        free = [peer for peer in range(peers) if free_from[peer] <= begins]
        count = rng.randint(1, max(1, peers // 2)) if kind == "partition" else 1
        count = min(count, len(free) - (peers + 1) // 2)
        if count < 1 or ends >= steps:
            continue
        struck = tuple(rng.sample(free, count))
        for peer in struck:
            free_from[peer] = ends + 1
        faults.append(Fault(len(faults) + 1, kind, struck, begins, ends))
    return tuple(faults)
