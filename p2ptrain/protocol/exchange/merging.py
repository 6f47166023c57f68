"""Which received fragments are merged in a step, with what weights, and which are skipped.

Of each sender a step looks at one fragment and merges at most one, so that sending more gives neither weight nor
further tries. Where comparing a fragment with θ ends in a later step, it is merged there: with the θ of that step, if
it is still of our epoch and young enough, and weighed with what else that step merges. Until then its sender's next
fragments wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.sparta import ClipRule, merge_weights
from p2ptrain.algorithms.transfers import Comparison, Transfer, Transfers
from p2ptrain.protocol.exchange.inbox import Inbox
from p2ptrain.protocol.exchange.types import Arrival, Epoch

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A fragment whose comparison with θ was started. `cpu_s`: CPU seconds that it took so far."""

    arrival: Arrival
    comparison: Transfer[Comparison]
    cpu_s: float


class Merger:
    """Merges the fragments of an inbox into the weights. For the training thread.

    Args:
        transfers: of the weights.
        max_age_steps: fragments that are older, in our own steps, are skipped.
        cpu_clock: CPU seconds of the thread that calls it.
        on_outlier: called with a peer whose fragments were refused 100 times in a row.

    Attributes:
        mixed: the blocks of each fragment merged since this list was cleared.
        cpu_s: CPU seconds of merging the last fragment.
    """

    def __init__(
        self, transfers: Transfers, inbox: Inbox, max_age_steps: float, cpu_clock: Callable[[], float],
        on_outlier: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.mixed: list[Blocks] = []
        self.cpu_s = 0.0
        self._transfers = transfers
        self._inbox = inbox
        self._max_age_steps = max_age_steps
        self._cpu_clock = cpu_clock
        self._on_outlier = on_outlier
        self._clip = ClipRule()
        self._compared: list[_Compared] = []

    def max_age_s(self, step_s: float) -> float:
        """The age from which on a fragment is skipped."""
        return self._max_age_steps * max(step_s, 1e-3)

    def step(self, now: float, epoch: Epoch, step_s: float) -> tuple[int, dict[str, int]]:
        """Merge what can be merged in this step.

        Args:
            now: on the clock of the arrivals.
            epoch: the last resolved round in the weights.
            step_s: duration of a step.

        Returns:
            The fragments merged, and those skipped by reason.
        """
        arrivals, skipped = self._inbox.take()
        if not arrivals and not skipped and not self._compared:
            return 0, {}
        max_age_s = self.max_age_s(step_s)
        held_back: list[Arrival] = []
        age_steps = 0.0
        covered: list[Blocks] = []
        # Those of earlier steps; of each sender there is at most one.
        started, self._compared = self._compared, []
        ready: list[_Compared] = []
        for compared in started:
            (ready if compared.comparison.done else self._compared).append(compared)
        looked_at = {compared.arrival.sender for compared in self._compared}
        finished = {compared.arrival.sender for compared in ready}

        def merge(arrival: Arrival, comparison: Transfer[Comparison], start_s: float) -> None:
            nonlocal age_steps
            if self._mix(arrival, comparison, covered, start_s):
                covered.append(arrival.plan.blocks)
                age_steps += _age_s(arrival, now) / max(step_s, 1e-3)
            else:
                skipped["clipped"] += 1

        for compared in ready:
            # A round may have landed since.
            if reason := _refused(compared.arrival, now, epoch, max_age_s):
                skipped[reason] += 1
            else:
                merge(compared.arrival, compared.comparison, self._cpu_clock() - compared.cpu_s)
        for arrival in arrivals:
            if reason := _refused(arrival, now, epoch, max_age_s):
                skipped[reason] += 1
            elif arrival.epoch.round > epoch.round or arrival.sender in looked_at:
                # The round has landed at the sender and not here yet, or it is not the sender's turn.
                held_back.append(arrival)
            else:
                looked_at.add(arrival.sender)
                start_s = self._cpu_clock()
                comparison = self._transfers.compare(arrival.plan, arrival.values)
                if comparison.done and arrival.sender not in finished:
                    merge(arrival, comparison, start_s)
                else:
                    self._compared.append(_Compared(arrival, comparison, self._cpu_clock() - start_s))
        return len(covered), self._inbox.settle(held_back, len(covered), skipped, age_steps)

    def _mix(self, arrival: Arrival, comparison: Transfer[Comparison], covered: list[Blocks], start_s: float) -> bool:
        """Merge a fragment, if it is near enough. `start_s`: when this began, on the clock of the CPU."""
        weight = merge_weights(covered, arrival.plan.blocks)
        weights = weight if isinstance(weight, float) else torch.from_numpy(weight)
        compared = comparison.finish()
        limit = self._clip.limit(compared.own_rms)
        rms = compared.mix(weights, limit)
        mixed = rms <= limit
        self._clip.record(arrival.sender, rms, mixed=mixed)
        if mixed:
            self.mixed.append(arrival.plan.blocks)
        elif self._clip.is_outlier(arrival.sender):
            self._on_outlier(arrival.sender)
        self.cpu_s = self._cpu_clock() - start_s
        return mixed


def _age_s(arrival: Arrival, now: float) -> float:
    return arrival.age_s + now - arrival.arrived_s


def _refused(arrival: Arrival, now: float, epoch: Epoch, max_age_s: float) -> str:
    """Why a fragment is not merged, also not later; "" if it may be."""
    if _age_s(arrival, now) > max_age_s:
        return "too_old"
    return "epoch" if arrival.epoch.lineage != epoch.lineage or arrival.epoch.round < epoch.round else ""
