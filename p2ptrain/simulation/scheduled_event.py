"""What is done to a peer while a run is simulated, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean

ACTIONS = ("join", "leave", "crash", "pause", "resume", "speed", "cut", "mend", "narrow", "widen")
# What takes another action back.
UNDOES = {"resume": "pause", "mend": "cut", "widen": "narrow"}
_WITH_VALUE = ("speed", "cut", "narrow")


@dataclass(frozen=True)
class ScheduledEvent:
    """Something that is done to a peer when the run has come to a step.

    Attributes:
        step: of the run, as time: step · step_s.
        action: one of ACTIONS. A peer whose first scheduled event is "join" is not there before.
        peer: its number, from 0.
        value: for "speed", relative to the other peers; for "narrow", Mbit/s of its link; for "cut", a number of the
            side that it is on: only peers of one side reach each other, until they are mended.
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
        """As `parse` reads it."""
        value = f":{self.value:g}" if self.action in _WITH_VALUE else ""
        return f"{self.step}:{self.action}:{self.peer}{value}"

    @classmethod
    def parse(cls, text: str) -> ScheduledEvent:
        """From "STEP:ACTION:PEER" or "STEP:speed:PEER:FACTOR". Raises ConfigError."""
        parts = text.strip().split(":")
        try:
            step, action, peer = int(parts[0]), parts[1], int(parts[2])
            value = float(parts[3]) if len(parts) > 3 else 1.0
        except (IndexError, ValueError):
            raise ConfigError(
                f"schedule {text!r}: must be STEP:ACTION:PEER, such as 300:crash:2, or 300:speed:2:0.5"
            ) from None
        if len(parts) > 4:
            raise ConfigError(f"schedule {text!r}: has more than four parts")
        return cls(step, action, peer, value)


def check_schedule(schedule: Iterable[ScheduledEvent], *, peers: int, steps: int) -> None:
    """Raises ConfigError naming the first entry that could do nothing.

    Args:
        schedule: what is done, in any order.
        peers: how many there are from the start; others have to join.
        steps: length of the run.
    """
    ordered = sorted(schedule, key=lambda scheduled_event: scheduled_event.step)
    first = {scheduled_event.peer: scheduled_event.action for scheduled_event in reversed(ordered)}
    known = {*range(peers), *(scheduled_event.peer for scheduled_event in ordered if scheduled_event.action == "join")}
    present = {peer for peer in range(peers) if first.get(peer) != "join"}
    done: set[tuple[str, int]] = set()  # actions that can be taken back, and to whom
    for scheduled_event in ordered:
        action, peer = scheduled_event.action, scheduled_event.peer
        if scheduled_event.step >= steps:
            raise _nothing(scheduled_event, f"the run has {steps} steps", "let it happen before, or give more --steps")
        if peer not in known:
            who = "the only peer is 0" if peers == 1 else f"the {peers} peers are 0 to {peers - 1}"
            raise _nothing(scheduled_event, who, f"name one of them, or let peer {peer} join")
        if action == "join":
            if peer in present:
                raise _nothing(
                    scheduled_event, f"peer {peer} is there already", "let it crash or leave before, or drop this"
                )
            present.add(peer)
        elif action in ("leave", "crash", "pause", "resume", "speed") and peer not in present:
            raise _nothing(scheduled_event, f"peer {peer} is not there then", "let it join before, or drop this")
        if action in ("leave", "crash"):
            present.remove(peer)
            done.discard(("pause", peer))  # who comes again is awake
        elif action == "pause" and ("pause", peer) in done:
            raise _nothing(scheduled_event, f"peer {peer} is paused already", "let it resume before, or drop this")
        elif action in UNDOES and (UNDOES[action], peer) not in done:
            raise _nothing(
                scheduled_event, f"no {UNDOES[action]} of peer {peer} comes before it", "add one, or drop this"
            )
        elif action in UNDOES:
            done.remove((UNDOES[action], peer))
        elif action in UNDOES.values():
            done.add((action, peer))


def _nothing(scheduled_event: ScheduledEvent, why: str, fix: str) -> ConfigError:
    return ConfigError(f"schedule {scheduled_event}: would do nothing, as {why}; {fix}")
