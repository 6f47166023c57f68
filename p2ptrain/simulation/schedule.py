"""The schedule of a simulation: actions on peers at steps, and random faults as pairs of such actions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean

ACTIONS = ("join", "leave", "crash", "pause", "resume", "speed", "cut", "mend", "narrow", "widen")
# Each of these undoes another action.
UNDOES = {"resume": "pause", "mend": "cut", "widen": "narrow"}
_WITH_VALUE = ("speed", "cut", "narrow")
# The actions of each kind of fault on a peer, each with the action that undoes it.
_FAULTS = {
    "crash": (("crash", "join"),),
    "pause": (("pause", "resume"), ("cut", "mend")),
    "partition": (("cut", "mend"),),
    "slow": (("narrow", "widen"),),
}
KINDS = tuple(_FAULTS)
# The slowest link that is supported.
SLOW_MBIT = 2.0


@dataclass(frozen=True)
class ScheduledEvent:
    """An action on a peer at a step of the run.

    Attributes:
        step: the time, as step · step_s.
        action: one of ACTIONS. A peer whose first event is "join" is absent before it.
        peer: its number, from 0.
        value: for "speed", relative to other peers; for "narrow", Mbit/s of its link; for "cut", the number of its side
            of a partition: only peers of one side reach each other, until "mend".
    """

    step: int
    action: str
    peer: int
    value: float = 1.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"schedule: unknown action {self.action!r}; {did_you_mean(self.action, ACTIONS)}")
        if self.step < 0 or self.peer < 0 or not 0 < self.value < math.inf:
            raise ConfigError(f"schedule {self}: step and peer must be 0 or more, a speed above 0")

    def __str__(self) -> str:
        """The text that `parse` reads."""
        value = f":{self.value:g}" if self.action in _WITH_VALUE else ""
        return f"{self.step}:{self.action}:{self.peer}{value}"

    @classmethod
    def parse(cls, text: str) -> ScheduledEvent:
        """From "STEP:ACTION:PEER" or "STEP:speed:PEER:FACTOR". Raises ConfigError."""
        parts = text.strip().split(":")
        try:
            step, action, peer, value = (*parts, "1")[:4]
            parsed = int(step), action, int(peer), float(value)
        except ValueError:
            example = "STEP:ACTION:PEER, such as 300:crash:2, or 300:speed:2:0.5"
            raise ConfigError(f"schedule {text!r}: must be {example}") from None
        if len(parts) > 4:
            raise ConfigError(f"schedule {text!r}: has more than four parts")
        return cls(*parsed)


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
            for action, undo in _FAULTS[self.kind]:
                yield ScheduledEvent(self.begins, action, peer, values.get(action, 1.0))
                yield ScheduledEvent(self.ends, undo, peer)


def check_schedule(schedule: Iterable[ScheduledEvent], *, peers: int, steps: int) -> None:
    """Raise ConfigError that names the first entry without effect.

    Args:
        schedule: events in any order.
        peers: number of peers at the start; all others have to join.
        steps: length of the run.
    """
    ordered = sorted(schedule, key=lambda event: event.step)
    first = {event.peer: event.action for event in reversed(ordered)}
    known = {*range(peers), *(event.peer for event in ordered if event.action == "join")}
    present = {peer for peer in range(peers) if first.get(peer) != "join"}
    done: set[tuple[str, int]] = set()  # actions that can be undone, with their peer

    def check(ok: bool, why: str, fix: str) -> None:
        if not ok:
            raise ConfigError(f"schedule {event}: has no effect, as {why}; {fix}")

    for event in ordered:
        action, peer, undone = event.action, event.peer, UNDOES.get(event.action)
        check(event.step < steps, f"the run has {steps} steps", "use an earlier step, or give more --steps")
        who = "the only peer is 0" if peers == 1 else f"the {peers} peers are 0 to {peers - 1}"
        check(peer in known, who, f"name one of them, or let peer {peer} join")
        if action == "join":
            check(peer not in present, f"peer {peer} is already in the run", "let it leave before, or drop this")
            present.add(peer)
        elif action in ("leave", "crash", "pause", "resume", "speed"):
            check(peer in present, f"peer {peer} is not in the run then", "let it join before, or drop this")
        if action in ("leave", "crash"):
            present.remove(peer)
            done.discard(("pause", peer))  # a peer that joins again is not paused
        if action == "pause":
            check(("pause", peer) not in done, f"peer {peer} is already paused", "let it resume before, or drop this")
        if undone is not None:
            check((undone, peer) in done, f"no {undone} of peer {peer} comes before it", "add one, or drop this")
            done.remove((undone, peer))
        if action in UNDOES.values():
            done.add((action, peer))
