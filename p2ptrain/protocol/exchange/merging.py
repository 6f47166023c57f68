"""Decides which received fragments a step merges, with what weights, and which it skips. Merges them.

A step looks at one fragment of each sender and merges at most one, so that a sender gains neither weight nor further
tries by sending more. If comparing a fragment with θ ends in a later step, that step merges it with its own θ, if the
fragment is still of our epoch and young enough, and weighs it together with the other fragments of that step. A
fragment waits while too many of its sender, or too many bytes of all senders, are being compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.indexspace import BlockPlan
from p2ptrain.algorithms.sparta import ClipRule, merge_weights
from p2ptrain.algorithms.transfers import Comparison, Transfer, has_ended
from p2ptrain.protocol.exchange.containment import Containment
from p2ptrain.protocol.exchange.inbox import Inbox
from p2ptrain.protocol.exchange.types import Arrival, Epoch, OutlierFound

Blocks = npt.NDArray[np.int64]
Compare = Callable[[BlockPlan, torch.Tensor], Transfer[Comparison]]

# Comparisons of one sender's fragments that may be under way: enough for one a step if each takes three steps more.
# Fragments that wait longer become too old (simulated with up to three).
MOST_OF_SENDER = 3
# Bytes of all fragments being compared: four of the largest (guess). A GPU needs three times as much meanwhile.
MOST_VALUES_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Compared:
    """A fragment whose comparison with θ has begun. `cpu_s`: CPU seconds that this took."""

    arrival: Arrival
    comparison: Transfer[Comparison]
    cpu_s: float


@dataclass(slots=True)
class _Pass:
    """The merging of one step: the conditions of that step, and the results so far.

    Attributes:
        now: on the clock of the arrivals.
        covered: the blocks of each merged fragment.
        held_back: fragments for later steps.
        age_steps: sum of the ages of merged fragments, in our steps.
    """

    now: float
    epoch: Epoch
    step_s: float
    max_age_s: float
    skipped: Counter[str]
    covered: list[Blocks] = field(default_factory=list)
    held_back: list[Arrival] = field(default_factory=list)
    age_steps: float = 0.0

    def refuses(self, arrival: Arrival) -> bool:
        """Whether a fragment is merged neither now nor later. Counts it as skipped then."""
        if self.age_s(arrival) > self.max_age_s:
            reason = "too_old"
        elif arrival.epoch.lineage != self.epoch.lineage or arrival.epoch.round < self.epoch.round:
            reason = "epoch"
        else:
            return False
        self.skipped[reason] += 1
        return True

    def age_s(self, arrival: Arrival) -> float:
        return arrival.age_s + self.now - arrival.arrived_s


class Merger:
    """Merges the fragments of an inbox into the weights. For the training thread.

    Args:
        compare: begins to compare a plan's blocks of θ with received ones (`FragmentTransfers.compare`).
        max_age_steps: fragments that are older, in our own steps, are skipped.
        cpu_clock: CPU seconds of the calling thread.
        tell: takes the events of the exchange.
        containment: logs errors, each of which costs a fragment.

    Attributes:
        mixed: the blocks of each fragment that may have changed weights. The owner clears this list.
        cpu_s: CPU seconds of merging the last fragment.
    """

    def __init__(
        self,
        compare: Compare,
        inbox: Inbox,
        max_age_steps: float,
        cpu_clock: Callable[[], float],
        tell: Callable[[OutlierFound], None],
        containment: Containment,
    ) -> None:
        self.mixed: list[Blocks] = []
        self.cpu_s = 0.0
        self._start_comparing = compare
        self._inbox = inbox
        self._max_age_steps = max_age_steps
        self._cpu_clock = cpu_clock
        self._tell = tell
        self._containment = containment
        self._clip = ClipRule()
        self._under_way: list[_Compared] = []

    def max_age_s(self, step_s: float) -> float:
        """Older fragments are skipped."""
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
        current = _Pass(now, epoch, max(step_s, 1e-3), self.max_age_s(step_s), skipped)
        had_begun = {compared.arrival.sender for compared in self._under_way}
        for compared in self._take_ready():
            # A round may have landed since.
            if not current.refuses(compared.arrival):
                self._merge(compared, current)
        counts = Counter(compared.arrival.sender for compared in self._under_way)
        looked_at = {sender for sender, count in counts.items() if count >= MOST_OF_SENDER}
        for arrival in arrivals:
            if current.refuses(arrival):
                continue
            if arrival.epoch.round > epoch.round or arrival.sender in looked_at or not self._has_room(arrival):
                # For a later step: its round has not landed here yet, its sender had its turn, or there is no room.
                current.held_back.append(arrival)
                continue
            looked_at.add(arrival.sender)
            started = self._compare(arrival, current)
            if started is None:
                continue
            if arrival.sender not in had_begun and has_ended(started.comparison):
                self._merge(started, current)
            else:
                self._under_way.append(started)
        merged = len(current.covered)
        return merged, self._inbox.settle(current.held_back, merged, current.skipped, current.age_steps)

    @property
    def under_way(self) -> bool:
        """Whether a comparison is not done. Never blocks."""
        return not all(compared.comparison.done for compared in self._under_way)

    def _take_ready(self) -> list[_Compared]:
        """Remove and return the comparisons for this step: the one of each sender that began first, if it is done."""
        ready: list[_Compared] = []
        left: list[_Compared] = []
        seen: set[str] = set()
        for compared in self._under_way:
            sender, ended = compared.arrival.sender, has_ended(compared.comparison)
            (ready if ended and sender not in seen else left).append(compared)
            seen.add(sender)
        self._under_way = left
        return ready

    def _has_room(self, arrival: Arrival) -> bool:
        """Whether there is memory to compare this fragment too. One of any size is always allowed."""
        taken = sum(compared.arrival.values.nbytes for compared in self._under_way)
        return not taken or taken + arrival.values.nbytes <= MOST_VALUES_BYTES

    def _compare(self, arrival: Arrival, current: _Pass) -> _Compared | None:
        """Begin to compare a fragment with θ; None if that failed."""
        start_s = self._cpu_clock()
        try:
            comparison = self._start_comparing(arrival.plan, arrival.values)
        except Exception as error:
            self._note_failed(error, current)
            return None
        return _Compared(arrival, comparison, self._cpu_clock() - start_s)

    def _merge(self, compared: _Compared, current: _Pass) -> None:
        """Merge a fragment whose comparison is done, if it is close enough to θ."""
        arrival, start_s = compared.arrival, self._cpu_clock() - compared.cpu_s
        weight = merge_weights(current.covered, arrival.plan.blocks)
        try:
            comparison = compared.comparison.finish()
            limit = self._clip.limit(comparison.own_rms)
            rms = comparison.mix(weight if isinstance(weight, float) else torch.from_numpy(weight), limit)
        except Exception as error:
            self.mixed.append(arrival.plan.blocks)  # some of them may have changed
            self._note_failed(error, current)
            return
        mixed = rms <= limit
        self._clip.record(arrival.sender, rms, mixed=mixed)
        if mixed:
            self.mixed.append(arrival.plan.blocks)
            current.covered.append(arrival.plan.blocks)
            current.age_steps += current.age_s(arrival) / current.step_s
        else:
            current.skipped["clipped"] += 1
            if self._clip.is_outlier(arrival.sender):
                self._tell(OutlierFound(arrival.sender))
        self.cpu_s = self._cpu_clock() - start_s

    def _note_failed(self, error: Exception, current: _Pass) -> None:
        self._containment.note("merging a received fragment", "it is skipped", error)
        current.skipped["failed"] += 1
