"""The part of a peer that its schedule and its turns read, without links."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from p2ptrain.protocol.rounds.deciding.timeouts import Timeouts
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.rounds.schedule import Schedule
from p2ptrain.protocol.wire.messages import Head
from p2ptrain.settings.config import RunConfig

PAIRWISE = RunConfig(averaging="pairwise", outer_optimizer="sgdm")


def head_of(round_: int = 4, voters: str = "abc", lineage: str = "0-l") -> Head:
    return Head("0-g", lineage, round_, "state", "anchor", tuple((name, f"{name}.1") for name in voters), 0, 0, None)


@dataclass
class Room:
    """The part of a peer "a" that its schedule reads."""

    peers: str = "bc"
    run: RunConfig = field(default_factory=lambda: RunConfig(sync_every=100))
    joiners: dict[str, int] = field(default_factory=dict)
    alone: bool = False
    due: bool = True
    at_length: bool = False
    linked: str | None = None  # in any lineage, such as the next
    lineage: str = "0-l"
    step_s: float = 0.1
    round_trip_s: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)

    def schedule(self) -> Schedule:
        present: set[Voter] = {(name, f"{name}.1") for name in "a" + self.peers}
        context: Any = SimpleNamespace(
            peer_id="a", run=self.run, timeouts=Timeouts(peer_timeout_s=30.0, round_timeout_s=600.0),
            exchange=SimpleNamespace(round_due=self.due, at_length=self.at_length, step_s=self.step_s),
            host=SimpleNamespace(lineage_peers=lambda: tuple(self.peers), joiners=lambda: self.joiners),
            links=SimpleNamespace(
                trainers=lambda: [
                    SimpleNamespace(beat=SimpleNamespace(lineage=self.lineage, round=4))
                    for _ in (self.peers if self.linked is None else self.linked)
                ]
            ),
            liveness=SimpleNamespace(
                present=lambda: present, is_alone=lambda head: self.alone, round_trip_s=lambda: self.round_trip_s,
                beats=lambda: {name: SimpleNamespace(speed=speed) for name, speed in self.speeds.items()},
                reaches=lambda head: self.reach or dict.fromkeys("a" + self.peers, 3),
            ),
        )  # fmt: skip
        return Schedule(context, random.Random(0))


def begun(room: Room, now: float = 100.0) -> Schedule:
    schedule = room.schedule()
    schedule.begin(head_of(), now, same_lineage=False)
    return schedule
