"""Random faults at a given rate, each undone after a while.

All faults are drawn from the experiment's seed before the run, as scheduled events.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.simulation.scheduled_event import ScheduledEvent

if TYPE_CHECKING:
    from p2ptrain.simulation.experiment import Experiment

# By kind, what is done to each peer, and what undoes it.
ACTIONS = {
    "crash": (("crash", "join"),),
    "pause": (("pause", "resume"), ("cut", "mend")),
    "partition": (("cut", "mend"),),
    "slow": (("narrow", "widen"),),
}
KINDS = tuple(ACTIONS)
# The slowest link that is supported.
SLOW_MBIT = 2.0


@dataclass(frozen=True)
class RandomFault:
    """One fault of some peers, between two steps of the run. `number` counts from 1."""

    number: int
    kind: str
    peers: tuple[int, ...]
    begins: int
    ends: int

    @property
    def scheduled_events(self) -> Iterator[ScheduledEvent]:
        """The actions on each peer, and those that undo them."""
        values = {"cut": self.number, "narrow": SLOW_MBIT}
        for peer in self.peers:
            for action, undo in ACTIONS[self.kind]:
                yield ScheduledEvent(self.begins, action, peer, values.get(action, 1.0))
                yield ScheduledEvent(self.ends, undo, peer)


def draw_faults(experiment: Experiment) -> tuple[RandomFault, ...]:
    """All faults of a run, ordered by their start; times between them are exponential.

    All kinds are equally likely. "crash": the peer vanishes and later starts anew, without its state. "pause": training
    and network stop and resume. "partition": up to half of the peers can reach only each other. "slow": a link of
    2 Mbit/s both ways. A peer has one fault at a time, and at most half of the peers have one at once; larger faults
    are left out or affect fewer peers. None is in the last interval, so that all peers take part in the last round.
    """
    rng = random.Random(f"storm/{experiment.seed}")
    peers, steps = experiment.peers, experiment.run.total_steps - experiment.run.sync_every
    faults: list[RandomFault] = []
    free_from = [0] * peers
    time_s = 0.0
    while experiment.faults_per_hour > 0:
        time_s += rng.expovariate(experiment.faults_per_hour / 3600)
        kind, ends_s = rng.choice(experiment.faults), time_s + experiment.fault_s * rng.uniform(0.5, 1.5)
        begins, ends = round(time_s / experiment.step_s), round(ends_s / experiment.step_s) + 1
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
        faults.append(RandomFault(len(faults) + 1, kind, struck, begins, ends))
    return tuple(faults)
