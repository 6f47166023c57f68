"""How much of a long transfer one step does.

To copy or change all weights of a large model takes the training thread long: at 350M parameters as long as one step or
several. Then each step does a slice of it, in pieces (`Transfer.advance`), so that the exchange makes no step longer
than 1.5 times its usual length. What takes less than a step's share is done in one, as it is for small models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.algorithms.transfers import Transfer

# A step's share for snapshots and landings, of its usual length. Fragments have the rest of the half (guess).
SHARE = 0.4
# The share is at least this: what takes less is not worth a second step (guess).
LEAST_S = 0.005


@dataclass(frozen=True, slots=True)
class Slice:
    """The time that one step has for snapshots and landings.

    Attributes:
        began_s: when its exchange began.
        step_s: the usual time between two exchanges; infinite where no training waits for this one.
        clock: the time now.
    """

    began_s: float
    step_s: float
    clock: Callable[[], float]

    def finish(self, transfer: Transfer[Any], by_s: float = math.inf) -> bool:
        """Finish a transfer that is done, or make at least one piece of it. Returns whether it is finished.

        Args:
            by_s: when it must be finished: at once, if the next step's slice would come too late.
        """
        end_s = self.began_s + max(SHARE * self.step_s, LEAST_S)
        if end_s + self.step_s > by_s:
            end_s = math.inf
        while transfer.advance():
            if self.clock() >= end_s:
                return False
        transfer.finish()
        return True
