"""Decides when a step gathers a push, and hands over those that have arrived in host memory.

The node offers one plan at a time. A step takes it once a fragment is due by the run's rate. The node then offers the
next one, even if the copy to host memory takes a step or two more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from p2ptrain.algorithms.indexspace import BlockPlan
from p2ptrain.algorithms.transfers import Transfer, has_ended
from p2ptrain.protocol.exchange.containment import Containment
from p2ptrain.protocol.exchange.types import Epoch, Push, PushPlan

# Pushes that may be on their way to host memory. With that many, no other begins. A copy takes a step or two (guess).
MOST_PUSHES_UNDER_WAY = 4


class Pusher:
    """Gathers pushes. For the training thread, except `offer`.

    Args:
        gather: begins to copy a plan's blocks of θ (`FragmentTransfers.gather`).
        slots_per_step: slots that a step pushes at rate 1.
        cpu_clock: CPU seconds of the calling thread.
        containment: logs errors, each of which costs a push.
    """

    def __init__(
        self,
        gather: Callable[[BlockPlan], Transfer[torch.Tensor]],
        slots_per_step: int,
        cpu_clock: Callable[[], float],
        containment: Containment,
    ) -> None:
        self._gather = gather
        self._slots_per_step = slots_per_step
        self._cpu_clock = cpu_clock
        self._containment = containment
        self._credit = 0.0
        # Transfers that have begun, in order, each with the function that makes a push of its values.
        self._under_way: deque[tuple[Transfer[torch.Tensor], Callable[[torch.Tensor], Push]]] = deque()
        # Written by both sides, under the lock.
        self._lock = threading.Lock()
        self._plan: PushPlan | None = None

    def offer(self, plan: PushPlan | None) -> None:
        """Set the next slots to gather; None forgets those that were set. Any thread may call it."""
        with self._lock:
            self._plan = plan

    def begin(self, now: float, rate: float, epoch: Epoch, steps: int) -> bool:
        """Begin to gather the offered plan, if it is due. Returns whether it was taken.

        Args:
            now: on the node's clock.
            rate: share of the slots that this step pushes on average.
            epoch, steps: of the weights, for the push.
        """
        self._credit += rate * self._slots_per_step
        with self._lock:
            plan = self._plan
            if plan is None or self._credit < plan.slot_count or now < plan.due_s:
                return False
            if len(self._under_way) >= MOST_PUSHES_UNDER_WAY:
                return False
            self._plan = None
        # Missed pushes are not made up for later.
        self._credit = min(self._credit - plan.slot_count, float(self._slots_per_step))
        start_s = self._cpu_clock()
        try:
            gathered = self._gather(plan.plan)
        except Exception as error:
            self._note_unsent(error)
            return True
        cpu_s = self._cpu_clock() - start_s
        self._under_way.append((gathered, lambda values: Push(plan, epoch, values, now, steps, cpu_s)))
        return True

    def take_arrived(self) -> list[Push]:
        """Remove and return the pushes that have arrived in host memory, in order."""
        arrived: list[Push] = []
        for ended in [has_ended(gathered) for gathered, _ in self._under_way]:
            if not ended:
                break
            gathered, push_of = self._under_way.popleft()
            try:
                arrived.append(push_of(gathered.finish()))
            except Exception as error:
                self._note_unsent(error)
        return arrived

    @property
    def under_way(self) -> bool:
        """Whether a push is on its way to host memory. Never blocks."""
        return not all(gathered.done for gathered, _ in self._under_way)

    def _note_unsent(self, error: Exception) -> None:
        self._containment.note("gathering a fragment", "it is not sent", error)
