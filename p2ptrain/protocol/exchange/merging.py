"""Which received fragments are merged in a step, with what weights, and which are skipped.

Of each sender a step looks at one fragment and merges at most one, so that sending more gives neither weight nor
further tries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.indexspace import WeightView, mix_clipped, rms_of
from p2ptrain.algorithms.sparta import ClipRule, merge_weights
from p2ptrain.protocol.exchange.inbox import Inbox
from p2ptrain.protocol.exchange.types import Arrival, Epoch

Blocks = npt.NDArray[np.int64]


class Merger:
    """Merges the fragments of an inbox into the weights. For the training thread.

    Args:
        view: of the weights.
        cpu_clock: CPU seconds of the thread that calls it.
        on_outlier: called with a peer whose fragments were refused 100 times in a row.

    Attributes:
        mixed: the blocks of each fragment merged since this list was cleared.
        cpu_s: CPU seconds of merging the last fragment.
    """

    def __init__(
        self, view: WeightView, inbox: Inbox, cpu_clock: Callable[[], float], on_outlier: Callable[[str], None]
    ) -> None:
        self.mixed: list[Blocks] = []
        self.cpu_s = 0.0
        self._view = view
        self._inbox = inbox
        self._cpu_clock = cpu_clock
        self._on_outlier = on_outlier
        self._clip = ClipRule()

    def step(self, now: float, epoch: Epoch, step_s: float, max_age_s: float) -> tuple[int, dict[str, int]]:
        """Merge what can be merged in this step.

        Args:
            now: on the clock of the arrivals.
            epoch: the last resolved round in the weights.
            step_s: duration of a step.
            max_age_s: older fragments are skipped.

        Returns:
            The fragments merged, and those skipped by reason.
        """
        arrivals, skipped = self._inbox.take()
        if not arrivals and not skipped:
            return 0, {}
        held_back: list[Arrival] = []
        age_steps = 0.0
        looked_at: set[str] = set()
        covered: list[Blocks] = []
        for arrival in arrivals:
            age_s = arrival.age_s + now - arrival.arrived_s
            if age_s > max_age_s:
                skipped["too_old"] += 1
            elif arrival.epoch.lineage != epoch.lineage or arrival.epoch.round < epoch.round:
                skipped["epoch"] += 1
            elif arrival.epoch.round > epoch.round or arrival.sender in looked_at:
                # The round has landed at the sender and not here yet, or it is not the sender's turn.
                held_back.append(arrival)
            else:
                looked_at.add(arrival.sender)
                if self._mix(arrival, covered):
                    covered.append(arrival.plan.blocks)
                    age_steps += age_s / max(step_s, 1e-3)
                else:
                    skipped["clipped"] += 1
        return len(covered), self._inbox.settle(held_back, len(covered), skipped, age_steps)

    def _mix(self, arrival: Arrival, covered: list[Blocks]) -> bool:
        start_s = self._cpu_clock()
        weight = merge_weights(covered, arrival.plan.blocks)
        weights = weight if isinstance(weight, float) else torch.from_numpy(weight)
        own = self._view.gather(arrival.plan)
        limit = self._clip.limit(rms_of(own, arrival.plan))
        rms = mix_clipped(self._view, arrival.plan, arrival.values, weights, limit, own)
        mixed = rms <= limit
        self._clip.record(arrival.sender, rms, mixed=mixed)
        if mixed:
            self.mixed.append(arrival.plan.blocks)
        elif self._clip.is_outlier(arrival.sender):
            self._on_outlier(arrival.sender)
        self.cpu_s = self._cpu_clock() - start_s
        return mixed
