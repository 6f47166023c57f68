"""The part of a peer that its schedule and its leader rotation read, without links."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from p2ptrain.protocol.rounds.deciding.policy import RecentContributors
from p2ptrain.protocol.rounds.deciding.timeouts import Timeouts
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.rounds.rotation import LeaderRotation
from p2ptrain.protocol.rounds.schedule import Schedule
from p2ptrain.protocol.wire.messages import Due, Head
from p2ptrain.settings.config import RunConfig

PAIRWISE = RunConfig(averaging="pairwise", outer_optimizer="sgdm")
DUE = Due("0-l", 5, 0)


def head_of(round_: int = 4, voters: str = "abc") -> Head:
    return Head("0-g", "0-l", round_, "state", "anchor", voters_of(voters), 0, 0, None)


def voters_of(names: str) -> tuple[Voter, ...]:
    return tuple((name, f"{name}.1") for name in names)


@dataclass
class FakePeer:
    """Set `due`, `present` and `own` at any time. `present` are the live peers of the lineage, without `own`."""

    present: str = "bc"
    run: RunConfig = field(default_factory=lambda: RunConfig(sync_every=100))
    joiners: dict[str, int] = field(default_factory=dict)
    alone: bool = False
    due: bool = True
    at_length: bool = False
    linked: str | None = None  # in any lineage, such as the next
    lineage: str = "0-l"
    rounds: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.1
    round_trip_s: float = 0.0
    speeds: dict[str, float] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    own: str = "a"

    def __post_init__(self) -> None:
        fake = self

        class Exchange:
            step_s = self.step_s
            round_due = property(lambda _: fake.due)
            at_length = property(lambda _: fake.at_length)

        class Liveness:
            def present(self) -> set[Voter]:
                return set(voters_of(fake.own + fake.present))

            def is_linked_as(self, voter: Voter) -> bool:
                return voter in self.present()

            def reaches(self, head: Head, recent: Collection[str]) -> dict[str, int]:
                return fake.reach or dict.fromkeys(fake.own + fake.present, 3)

            def beats(self) -> dict[str, Any]:
                names = fake.speeds.keys() | fake.rounds.keys()
                return {
                    name: SimpleNamespace(speed=fake.speeds.get(name, 0.0), round=fake.rounds.get(name, 4))
                    for name in names
                }

            def is_alone(self, head: Head) -> bool:
                return fake.alone

            def round_trip_s(self) -> float:
                return fake.round_trip_s

        class Context:
            run = self.run
            timeouts = Timeouts(peer_timeout_s=30.0, round_timeout_s=600.0)
            exchange = Exchange()
            liveness = Liveness()
            host = SimpleNamespace(lineage_peers=lambda: tuple(fake.present), joiners=lambda: fake.joiners)
            links = SimpleNamespace(trainers=lambda: fake._trainers())
            recent = RecentContributors()
            peer_id = property(lambda _: fake.own)

        self.context: Any = Context()
        self.rotation = LeaderRotation(self.context)
        self.schedule = Schedule(self.context, self.rotation, random.Random(0))

    def _trainers(self) -> list[Any]:
        beat = SimpleNamespace(lineage=self.lineage, round=4)
        return [SimpleNamespace(beat=beat) for _ in (self.present if self.linked is None else self.linked)]

    def begin(self, head: Head | None = None, now: float = 100.0) -> FakePeer:
        """A head, without a history, in another lineage than before."""
        self.rotation.begin(head or head_of(), (), same_lineage=False)
        self.schedule.begin(now, same_lineage=False)
        return self
