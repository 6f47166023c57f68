"""Whether the interval between two rounds is long enough, and a warning if it is not. Pure, but for its history.

Training goes on during a round, so that its result lands late. That costs loss: with H = 25 and int4, landing 5 steps
late 0.04 nats, 20 steps late 0.13 (simulated, 156 thousand parameters, Muon inside; with AdamW 0.06 and 0.16).
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# What we advise: H is at least ten times what a round takes (guess; a fifth cost 0.04 nats).
SHARE_OF_INTERVAL = 0.1
# The median of so many rounds counts: one that was slow says nothing about H.
ROUNDS = 3
# H cannot change in a run, so that more often would not help.
AGAIN_AFTER_S = 3600.0


def fewest_steps(round_s: float, step_s: float) -> int:
    """The least H with which a round takes at most a tenth of its interval."""
    return math.ceil(round_s / SHARE_OF_INTERVAL / step_s - 1e-9)


class IntervalWatch:
    """The seconds that this peer's last rounds took. `sync_every`: the run's H."""

    def __init__(self, sync_every: int) -> None:
        self._sync_every = sync_every
        self._rounds_s: deque[float] = deque(maxlen=ROUNDS)
        self._told_s = -math.inf

    def note(self, round_s: float, own_sync_every: int, step_s: float, now: float) -> str:
        """A round has landed. Returns a warning if rounds take too much of the interval; empty if not, or told lately.

        Args:
            round_s: from its first attempt to its landing.
            own_sync_every: this peer's inner steps in an interval: more than the run's H if it is faster than others.
            step_s: duration of one of them.
        """
        self._rounds_s.append(round_s)
        usual_s, interval_s = statistics.median(self._rounds_s), own_sync_every * step_s
        is_long_enough = usual_s <= SHARE_OF_INTERVAL * interval_s
        if is_long_enough or not interval_s or len(self._rounds_s) < ROUNDS or now - self._told_s < AGAIN_AFTER_S:
            return ""
        self._told_s = now
        enough = fewest_steps(usual_s, interval_s / self._sync_every)
        return (
            f"a round takes {usual_s:.2g} s, {100 * usual_s / interval_s:.0f} % of an interval of {own_sync_every} "
            f"steps of {step_s:.2g} s, and its result lands late, which costs loss. This run keeps its H = "
            f"{self._sync_every}; give the next one --sync-every {enough} or more, or a --round-codec with fewer bytes"
        )
