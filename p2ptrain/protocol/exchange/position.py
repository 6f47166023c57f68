"""A peer's position in the run, in its own steps and in steps of the run. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """Replaced as a whole, so that other threads read a consistent one.

    Attributes:
        run_sync_every: the run's H, in inner steps.
        total_steps: length of the run, in steps of the run; 0 for no end.
        sync_every: this peer's own H until the next round.
        steps: inner steps since this peer joined.
        base_at_steps, base_run_step: `steps` and `run_step` at the start of this interval.
    """

    run_sync_every: int
    total_steps: int
    sync_every: int
    steps: int = 0
    base_at_steps: int = 0
    base_run_step: int = 0

    @property
    def run_step(self) -> int:
        """The run step of the last round, plus our steps since, scaled to the run's H."""
        since = (self.steps - self.base_at_steps) * self.run_sync_every / self.sync_every
        position = self.base_run_step + int(since)
        return min(position, self.total_steps) if self.total_steps else position

    @property
    def at_length(self) -> bool:
        return bool(self.total_steps) and self.run_step >= self.total_steps

    @property
    def due(self) -> bool:
        """Whether this peer has made its steps for the next round."""
        return self.steps - self.base_at_steps >= self.sync_every or self.at_length

    @property
    def of_interval(self) -> float:
        """Completed fraction of the interval between two rounds."""
        return (self.steps - self.base_at_steps) / self.sync_every

    @property
    def of_run(self) -> float:
        """Completed fraction of the run; 0 for a run without an end."""
        return self.run_step / self.total_steps if self.total_steps else 0.0

    def stepped(self) -> Position:
        """After one more inner step."""
        # Called at every step; `replace` takes three times as long.
        return Position(
            self.run_sync_every,
            self.total_steps,
            self.sync_every,
            self.steps + 1,
            self.base_at_steps,
            self.base_run_step,
        )

    def postponed(self) -> Position:
        """After a skipped round: the next is due one interval from here."""
        return dataclasses.replace(self, base_run_step=self.run_step, base_at_steps=self.steps)

    def landed(self, run_step: int, sync_every: int, since_steps: int | None) -> Position:
        """After a round has landed. The next interval begins at our step `since_steps`, or now (None)."""
        begins_at = self.steps if since_steps is None else since_steps
        return dataclasses.replace(self, base_run_step=run_step, base_at_steps=begins_at, sync_every=sync_every)
