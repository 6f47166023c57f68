"""What is done to a peer while a run is simulated, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.settings import did_you_mean

ACTIONS = ("join", "leave", "crash", "pause", "resume", "speed", "cut", "mend", "narrow", "widen")


@dataclass(frozen=True)
class Happening:
    """Something that is done to a peer when the run has come to a step.

    Attributes:
        step: of the run, as time: step · step_s.
        action: one of ACTIONS. A peer whose first happening is "join" is not there before.
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
            raise ConfigError(f"schedule: {self}: step and peer must be 0 or more, a speed above 0")

    @classmethod
    def parse(cls, text: str) -> Happening:
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
