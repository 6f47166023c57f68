"""The synchronous half of `Peer.step()`: what is mixed into the weights, what is handed over, when a round is due.

An `Exchange` is the only thing that touches the model, and only inside `step()`, on the training thread. The node
runs elsewhere (the network thread, or the same thread under virtual time) and meets it through a bounded inbox,
single slots that one side fills and the other empties, and `post`, which runs a callable on the node's side.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.fragments import Walk
from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.algorithms.schedules import fragment_rate
from p2ptrain.algorithms.sparta import ClipRule, max_age_steps, merge_weights
from p2ptrain.protocol.exchange_types import (
    Arrival,
    Changes,
    Epoch,
    Landing,
    Push,
    PushPlan,
    RoundReport,
    Snapshot,
    SnapshotWanted,
    StepReport,
)
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.settings.config import RunConfig

# Fragments waiting for the next step. 64 partners at one fragment a step; beyond that the oldest are dropped.
MAX_INBOX = 64
# Of these at most so many wait of one sender; two peers in step send each other one a step, but not evenly.
MAX_WAITING_PER_SENDER = 2
# The moving average of the step time forgets after about ten steps: speeds change slowly (guess).
STEP_TIME_DECAY = 0.9


class Averaged(Protocol):
    """What rounds average: the parameters, and maybe the inner optimizer's moments."""

    space: IndexSpace

    def read(self, out: torch.Tensor) -> None: ...

    def write(self, flat: torch.Tensor) -> None: ...

    def add(self, flat: torch.Tensor) -> None: ...


class Exchange:
    """Joins a model's parameters to a node.

    Args:
        space: index space of `tensors`.
        tensors: the live trainable parameters; changed in place, inside `step()` only, never re-pointed.
        run: the run's settings; each landing brings this peer's own H.
        averaged: what rounds average, the blocks of `space` first; None: just these.
        clock: seconds on the node's clock, callable from any thread.
        post: runs a callable on the node's side, soon.
    """

    def __init__(
        self,
        space: IndexSpace,
        tensors: Sequence[torch.Tensor],
        run: RunConfig,
        *,
        averaged: Averaged | None = None,
        clock: Callable[[], float],
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self.space = space
        self.view = ParameterView(space, tensors)
        self.averaged = averaged or self.view
        self.epoch = Epoch()
        self.finished = False
        self.step_s = 0.0
        self.on_due: Callable[[], None] = lambda: None
        self.on_push: Callable[[Push], None] = lambda push: None
        self.on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None
        self.on_landed: Callable[[Landing, float], None] = lambda landing, held_s: None
        # Tokens that this peer has to train on, for runs that weigh by it; set before training begins.
        self.shard_tokens = 0
        self._num_moments = OUTER_OPTIMIZERS[run.outer_optimizer].num_moments
        self._max_age_steps = max_age_steps(run.fragment_fraction, run.max_staleness)
        self._slots_per_step = Walk.of(run.fragment_fraction).per_step if run.fragment_fraction else 0
        self._total_steps = run.total_steps
        self._run_sync_every = run.sync_every
        self._fragment_schedule = run.fragment_schedule
        self._clock = clock
        self._post = post
        self._lock = threading.Lock()
        self._inbox: deque[Arrival] = deque()
        self._dropped: Counter[str] = Counter()
        self._merged_total = 0
        self._age_steps_total = 0.0
        self._skipped_total: Counter[str] = Counter()
        self._push_plan: PushPlan | None = None
        self._credit = 0.0
        self._wanted: SnapshotWanted | None = None
        self._landing: Landing | None = None
        self._clip = ClipRule()
        self._last_end_s: float | None = None
        self._sync_every = run.sync_every
        self._base_run_step = 0
        self._base_at_steps = 0
        self._told_due = False
        self.steps = 0
        self._tokens = 0
        self._rewritten = False
        self._mixed: list[npt.NDArray[np.int64]] = []

    # --- the node's side ----------------------------------------------------------------------------------------

    def new_state(self) -> AnchorState:
        """A state of zeros of the shape that rounds agree on here."""
        return AnchorState(self.averaged.space.num_blocks, self._num_moments, self.space.num_blocks)

    def deliver(self, arrival: Arrival) -> None:
        """Queue a fragment for the next step; the oldest is dropped when the inbox is full."""
        with self._lock:
            self._inbox.append(arrival)
            self._trim_inbox()

    def count_skipped(self, reason: str, n: int = 1) -> None:
        """Count a fragment that was refused before it came here."""
        with self._lock:
            self._dropped[reason] += n

    def take_counts(self) -> tuple[int, dict[str, int], float]:
        """Fragments merged and skipped by reason since the last call, and the mean age of the merged in our steps."""
        with self._lock:
            merged, skipped, age_steps = self._merged_total, dict(self._skipped_total), self._age_steps_total
            self._merged_total, self._skipped_total, self._age_steps_total = 0, Counter(), 0.0
        return merged, skipped, age_steps / merged if merged else 0.0

    def offer_push(self, plan: PushPlan) -> None:
        """Give the training thread the next slots to gather."""
        self._push_plan = plan

    def want_snapshot(self, wanted: SnapshotWanted | None) -> None:
        """Ask for a snapshot at the next due step, or withdraw the wish."""
        self._wanted = wanted

    def land(self, landing: Landing) -> None:
        """Hand over a resolved round, to take effect in the next step."""
        assert self._landing is None, "one round lands at a time"
        self._landing = landing

    @property
    def landing_pending(self) -> bool:
        """Whether a resolved round waits for the next step."""
        return self._landing is not None

    # --- where we stand -----------------------------------------------------------------------------------------

    @property
    def run_step(self) -> int:
        """Position in the run: that of the last round, plus our steps since, scaled to the run's H."""
        since = (self.steps - self._base_at_steps) * self._run_sync_every / self._sync_every
        position = self._base_run_step + int(since)
        return min(position, self._total_steps) if self._total_steps else position

    @property
    def at_length(self) -> bool:
        return bool(self._total_steps) and self.run_step >= self._total_steps

    @property
    def due(self) -> bool:
        return self.steps - self._base_at_steps >= self._sync_every or self.at_length

    @property
    def tokens(self) -> int:
        """Tokens trained on since our outer gradient was last included."""
        return self._tokens

    @property
    def fragment_rate(self) -> float:
        """Slots that a step pushes on average, by the run's schedule of p."""
        interval_position = (self.steps - self._base_at_steps) / self._sync_every
        progress = self.run_step / self._total_steps if self._total_steps else 0.0
        return fragment_rate(self._fragment_schedule, interval_position, progress)

    @property
    def max_age_s(self) -> float:
        """Older fragments do more harm than good: p · delay ≤ 0.15, counted in this peer's own steps."""
        return self._max_age_steps * max(self.step_s, 1e-3)

    def postpone(self) -> None:
        """A round was skipped: the next is due one interval from here; nothing else changes."""
        self._base_run_step = self.run_step
        self._base_at_steps = self.steps
        self._told_due = False

    # --- the training thread's side -----------------------------------------------------------------------------

    def step(self, samples: int) -> StepReport:
        """Exchange after one optimizer step. O(pN), but for the two O(N) passes of each round."""
        start = self._clock()
        if self._last_end_s is not None:
            took = start - self._last_end_s
            self.step_s = took if self.step_s == 0 else STEP_TIME_DECAY * self.step_s + (1 - STEP_TIME_DECAY) * took
        self.steps += 1
        self._tokens += samples
        self._mixed.clear()
        report = self._land()
        merged, skipped = self._merge(start)
        sent = self._gather(start)
        self._snapshot(start)
        if self.due and not self._told_due:
            self._told_due = True
            self._post(self.on_due)
        end = self._clock()
        self._last_end_s = end
        return StepReport(sent, merged, skipped, end - start, report, self.finished)

    def idle(self) -> RoundReport | None:
        """Land what has come in without training: for the wait at the end of a run."""
        report = self._land()
        self._snapshot(self._clock())
        return report

    def take_changes(self) -> Changes:
        """What the last step, and what has landed since this was last asked, wrote to the weights."""
        blocks = np.unique(np.concatenate(self._mixed)) if self._mixed else np.zeros(0, np.int64)
        changes = Changes(self._rewritten, blocks)
        self._rewritten = False
        self._mixed.clear()
        return changes

    def _land(self) -> RoundReport | None:
        landing = self._landing
        if landing is None:
            return None
        start = self._clock()
        if landing.kind == "add":
            assert landing.buffer is not None
            self.averaged.add(landing.buffer)
        elif landing.kind == "write":
            assert landing.buffer is not None
            self.averaged.write(landing.buffer)
        self._rewritten |= landing.kind != "keep"
        self.epoch = landing.epoch
        # The next round is counted from the snapshot, so that the time a round takes is not added to each interval.
        self._base_at_steps = self.steps if landing.snapshot_steps is None else landing.snapshot_steps
        self._base_run_step = landing.run_step
        self._sync_every = landing.sync_every
        self._tokens = 0 if landing.kind == "write" else max(0, self._tokens - landing.included_tokens)
        self._told_due = False
        self.finished = landing.finished
        self._landing = None
        held_s = self._clock() - start
        self._post(lambda: self.on_landed(landing, held_s))
        return landing.report

    def _merge(self, now: float) -> tuple[int, dict[str, int]]:
        if not self._inbox and not self._dropped:
            return 0, {}
        with self._lock:
            arrivals, skipped = list(self._inbox), self._dropped
            self._inbox.clear()
            self._dropped = Counter()
        held_back: list[Arrival] = []
        age_steps = 0.0
        covered: dict[str, np.ndarray] = {}
        for arrival in arrivals:
            age_s = arrival.age_s + now - arrival.arrived_s
            if age_s > self.max_age_s:
                skipped["too_old"] += 1
            elif arrival.epoch.lineage != self.epoch.lineage or arrival.epoch.round < self.epoch.round:
                skipped["epoch"] += 1
            elif arrival.epoch.round > self.epoch.round or arrival.sender in covered:
                # From a peer where the round has landed already: it fits once it has landed here. And of one sender
                # a step merges one fragment, so that nobody weighs more by sending more; the next waits its turn.
                held_back.append(arrival)
            elif self._mix(arrival, list(covered.values())):
                covered[arrival.sender] = arrival.plan.blocks
                age_steps += age_s / max(self.step_s, 1e-3)
            else:
                skipped["clipped"] += 1
        held_back = self._bounded(held_back, skipped)
        skipped = +skipped
        with self._lock:
            self._inbox.extendleft(reversed(held_back))
            self._trim_inbox()
            self._merged_total += len(covered)
            self._age_steps_total += age_steps
            self._skipped_total.update(skipped)
        return len(covered), dict(skipped)

    def _trim_inbox(self) -> None:
        while len(self._inbox) > MAX_INBOX:
            self._inbox.popleft()
            self._dropped["inbox_full"] += 1

    @staticmethod
    def _bounded(waiting: list[Arrival], skipped: Counter[str]) -> list[Arrival]:
        """The newest few of each sender: who sends faster than we step is not queued up without end."""
        newest: dict[str, deque[Arrival]] = {}
        for arrival in waiting:
            queue = newest.setdefault(arrival.sender, deque(maxlen=MAX_WAITING_PER_SENDER))
            skipped["superseded"] += len(queue) == MAX_WAITING_PER_SENDER
            queue.append(arrival)
        return [arrival for queue in newest.values() for arrival in queue]

    def _mix(self, arrival: Arrival, covered: list[np.ndarray]) -> bool:
        weight = merge_weights(covered, arrival.plan.blocks)
        weights = weight if isinstance(weight, float) else torch.from_numpy(weight)
        limit = self._clip.threshold(0.0 if self._clip.warm else self.view.rms(arrival.plan))
        rms = self.view.mix_clipped(arrival.plan, arrival.values, weights, limit)
        if rms <= limit:
            self._clip.accept(rms)
            self._mixed.append(arrival.plan.blocks)
            return True
        self._clip.refuse(limit)
        return False

    def _gather(self, now: float) -> int:
        self._credit += self.fragment_rate * self._slots_per_step
        plan = self._push_plan
        if plan is None or self._credit < plan.slot_count:
            return 0
        self._push_plan = None
        # What could not be pushed in time is not made up for later.
        self._credit = min(self._credit - plan.slot_count, float(self._slots_per_step))
        push = Push(plan, self.epoch, self.view.gather(plan.plan), now, self.steps)
        self._post(lambda: self.on_push(push))
        return 1

    def _snapshot(self, now: float) -> None:
        wanted = self._wanted
        if wanted is None or not (self.due or now >= wanted.latest_s):
            return
        self._wanted = None
        self.averaged.read(wanted.buffer)
        snapshot = Snapshot(
            self.epoch, wanted.buffer, self._tokens, self.steps, self.run_step, self.at_length, self._clock() - now
        )
        self._post(lambda: self.on_snapshot(snapshot))
