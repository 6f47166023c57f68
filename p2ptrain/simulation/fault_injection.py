"""A storm: faults at random times, as many an hour as the experiment says, each undone after a while.

The storm is drawn before the run from the experiment's seed, as scheduled events like those of its schedule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from p2ptrain.simulation.scheduled_event import ScheduledEvent

KINDS = ("crash", "pause", "partition", "slow")
# The slowest link that we look after (issue of slow links: 1000, 100, 10 and 2 Mbit/s).
SLOW_MBIT = 2.0


@dataclass(frozen=True)
class Fault:
    """One fault: what befalls some peers from one step of the run, as time, to another. `number` counts from 1."""

    number: int
    kind: str
    peers: tuple[int, ...]
    begins: int
    ends: int

    @property
    def scheduled_events(self) -> Iterator[ScheduledEvent]:
        """What is done to each peer, and undone."""
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


def draw_storm(
    *, peers: int, kinds: tuple[str, ...], faults_per_hour: float, fault_s: float, step_s: float, steps: int, seed: int
) -> tuple[Fault, ...]:
    """All faults of a run, in the order of their beginnings.

    Each kind is as likely. "crash": gone without a word, and started anew, with nothing but its number. "pause": the
    machine stands still, training and network, and wakes up. "partition": some peers, up to half, can reach each
    other only. "slow": a link of 2 Mbit/s both ways. A peer suffers from one fault at a time, and at most half of them
    at once: what would strike more is left out, or strikes fewer.

    Args:
        peers: those that there are, by number from 0.
        kinds: what may happen, of KINDS.
        faults_per_hour: of virtual time, for all peers together; times between faults are exponential.
        fault_s: how long one lasts on average, in virtual seconds: from half as long to half as long again.
        step_s: of one step of the run.
        steps: after which all faults are over.
        seed: of everything.
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
