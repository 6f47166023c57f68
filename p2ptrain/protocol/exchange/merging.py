"""Which received fragments are merged in a step, with what weights, and which are skipped.

Of each sender a step looks at one fragment and merges at most one, so that sending more gives neither weight nor
further tries. Where comparing a fragment with θ ends in a later step, it is merged there: with the θ of that step, if
it is still of our epoch and young enough, and weighed with what else that step merges. Until then further fragments
wait, if there are too many of its sender, or too large ones of all.
"""

from __future__ import annotations

from collections import Counter
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

# Comparisons of one sender's fragments that may be under way: enough for one a step if each takes three steps more.
# Those that wait longer become too old (simulated with up to three).
MOST_OF_SENDER = 3
# Values of all of them; on a GPU each needs three times as much while it is under way. Four of the largest (guess).
MOST_VALUES_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _UnderWay:
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
        self._under_way: list[_UnderWay] = []

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
        if not arrivals and not skipped and not self._under_way:
            return 0, {}
        max_age_s = self.max_age_s(step_s)
        held_back: list[Arrival] = []
        age_steps = 0.0
        covered: list[Blocks] = []
        # Those of earlier steps: of each sender the first, if it is done.
        started, self._under_way = self._under_way, []
        ready: list[_UnderWay] = []
        merging: set[str] = set()
        for compared in started:
            sender, done = compared.arrival.sender, compared.comparison.done
            (ready if done and sender not in merging else self._under_way).append(compared)
            merging.add(sender)
        looked_at = {sender for sender, count in self._counts().items() if count >= MOST_OF_SENDER}

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
            elif arrival.epoch.round > epoch.round or arrival.sender in looked_at or not self._has_room(arrival):
                # The round has landed at the sender and not here yet, it is not the sender's turn, or there are many.
                held_back.append(arrival)
            else:
                looked_at.add(arrival.sender)
                start_s = self._cpu_clock()
                comparison = self._transfers.compare(arrival.plan, arrival.values)
                if comparison.done and arrival.sender not in merging:
                    merge(arrival, comparison, start_s)
                else:
                    self._under_way.append(_UnderWay(arrival, comparison, self._cpu_clock() - start_s))
        return len(covered), self._inbox.settle(held_back, len(covered), skipped, age_steps)

    @property
    def under_way(self) -> bool:
        """Whether a comparison is not done. Never blocks."""
        return not all(compared.comparison.done for compared in self._under_way)

    def _counts(self) -> Counter[str]:
        return Counter(compared.arrival.sender for compared in self._under_way)

    def _has_room(self, arrival: Arrival) -> bool:
        """Whether the memory for comparing this fragment may be taken too. One of any size may."""
        taken = sum(compared.arrival.values.nbytes for compared in self._under_way)
        return not taken or taken + arrival.values.nbytes <= MOST_VALUES_BYTES

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
