"""Decides how much of a long transfer one step does.

Copying or changing all weights of a large model takes the training thread long: at 350M parameters as long as one step
or several. So each step does only a slice, in pieces (`Transfer.advance`), and no step takes longer than 1.5 times its
usual length. A transfer that takes less than a step's share, as for small models, is done in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.algorithms.transfers import Transfer

# Time for snapshots and landings in a step, as a share of its usual length. Fragments may take another tenth (guess).
SHARE = 0.4
# The time is at least this: a shorter transfer is not worth a second step (guess).
LEAST_S = 0.005


@dataclass(frozen=True, slots=True)
class Slice:
    """The time that one step has for snapshots and landings.

    Attributes:
        began_s: when the step's exchange began.
        step_s: the usual time between two exchanges; infinite if no training waits.
        clock: returns the time now.
    """

    began_s: float
    step_s: float
    clock: Callable[[], float]

    def finish(self, transfer: Transfer[Any], by_s: float = math.inf) -> bool:
        """Do at least one piece of a transfer, and as many as fit this slice. Returns whether the transfer is finished.

        Args:
            by_s: when the transfer must be finished. It is finished now if the next step's slice would be too late.
        """
        end_s = self.began_s + max(SHARE * self.step_s, LEAST_S)
        if end_s + self.step_s > by_s:
            end_s = math.inf
        while transfer.advance():
            if self.clock() >= end_s:
                return False
        transfer.finish()
        return True
