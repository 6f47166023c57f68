"""The synchronous part of `Peer.step()`: merges fragments (`merging.py`), gathers pushes (`pushing.py`), takes
snapshots (`snapshots.py`), and lands rounds.

Only an `Exchange` changes the model, on the training thread, and only inside `step()`, `idle()` and `finish_landing()`.
The node runs elsewhere (on the network thread, or on the same thread under virtual time). They communicate through a
bounded inbox, through single slots that one side fills and the other empties, and through the events of
`types.ExchangeEvent`, which the node receives on its own thread.

Weights on a GPU are copied beside training (`algorithms/transfers.py`): one step starts a transfer, and a later step
finishes it. The order of a step's parts is the same. Until a step applies a round that is landing, the epoch is the old
one, nothing is reported, and no snapshot is begun. A snapshot and a push have the weights, position, tokens and epoch
of the step that began them. If a round lands between the comparison of a fragment and its merge, the fragment is
skipped: its epoch is old by then.

If the training thread itself copies the weights, a snapshot or a landing of a large model is made in slices over
several steps (`slices.py`). Between the first and the last slice of a landing the weights are of two epochs: no push is
gathered, and received fragments wait. The epoch, the position and the tokens change with the last slice. If a landing
begins before a snapshot is complete, the snapshot begins again. Without training, all is one slice. So is the run's
last round, after which all peers must have the same weights.

Ctrl-C waits for the end of a step: an exception at an arbitrary place could repeat a change, or leave it out.

An error of a transfer, such as missing memory on a GPU, costs one fragment. A snapshot or a landing is tried again at
the next step. Until a landing succeeds, this peer takes part in no other round.

Both sides write the position, the landing and the slots (`Pusher`, `Snapshotter`, `Inbox`), each under a lock of its
own, which is never held while tensors are read or written. The epoch is replaced as a whole, also under the lock;
reading it needs no lock. The node attaches and detaches the listener. Only the training thread writes anything else.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from p2ptrain.algorithms.fragments import Walk
from p2ptrain.algorithms.indexspace import FlatView, WeightView
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.algorithms.schedules import fragment_rate
from p2ptrain.algorithms.sparta import max_age_steps
from p2ptrain.algorithms.transfers import FlatAtOnce, FlatTransfers, Transfer, Transfers, at_once, has_ended
from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange import types
from p2ptrain.protocol.exchange.containment import Containment
from p2ptrain.protocol.exchange.inbox import Inbox
from p2ptrain.protocol.exchange.merging import Merger
from p2ptrain.protocol.exchange.position import Position
from p2ptrain.protocol.exchange.pushing import Pusher
from p2ptrain.protocol.exchange.slices import Slice
from p2ptrain.protocol.exchange.snapshots import Snapshotter
from p2ptrain.protocol.wire.messages import MAX_SPEED
from p2ptrain.settings.config import RunConfig
from p2ptrain.signals import interrupt_held

logger = logging.getLogger(__name__)

# The moving average of the step time covers about ten steps: speeds change slowly (guess). A step counts as at most
# twice the longest of the last ten, as a rare pause (an evaluation, a later compilation, a frozen process) is none.
STEP_TIME_DECAY = 0.9
LAST_STEPS = 10
MOST_LONGEST_STEPS = 2.0


class Exchange:
    """Connects a model's parameters to a node.

    Args:
        view: of the live trainable parameters, which are changed in place.
        averaged: what rounds average: the parameters and the inner optimizer's moments; None: only the parameters.
        transfers: copies parameters; None: they are read and written at once, as moments always are.
        clock: seconds on the node's clock, callable from any thread.
        post: runs a callable on the node's thread, soon.
        cpu_clock: CPU seconds of the calling thread. Simulations leave it out: gossip costs nothing there.
        drops: what a simulation loses.

    Attributes:
        epoch: the last resolved round in the weights.
        tokens: trained on since our outer gradient was last in a mean.
        sections: the blocks [first, end) of each, if rounds average one section at a time.
        inbox: received fragments, and counts of merged and skipped ones.
        landing_error: the last error of a round that is landing; None once it has landed.
    """

    def __init__(
        self,
        view: WeightView,
        run: RunConfig,
        *,
        averaged: FlatView | None = None,
        transfers: Transfers | None = None,
        clock: Callable[[], float],
        post: Callable[[Callable[[], object]], object],
        cpu_clock: Callable[[], float] = lambda: 0.0,
        drops: types.Drops = types.NO_DROPS,
    ) -> None:
        self.space = view.space
        self.view = view
        self.averaged: FlatView = averaged or view
        transfers = transfers or at_once(view)
        self._fragments = transfers.fragments
        self._flat = transfers.flat if averaged is None else FlatAtOnce(averaged)
        sections = self.space.sections(run.round_sections) if run.round_sections > 1 else ()
        if 0 < len(sections) < run.round_sections:
            message = "round_sections is %d, but only %d tensors have values: each is a section"
            logger.warning(message, run.round_sections, len(sections))
        self._flats = [transfers.section(tensors) for tensors in sections]
        starts = self.space.tensor_starts.tolist()
        self.sections = [(starts[tensors.start], starts[tensors.stop]) for tensors in sections]
        self.inbox = Inbox()
        self.epoch = types.Epoch()
        self.finished = False
        self.landing_error: Exception | None = None
        self._unreported: deque[types.RoundReport] = deque()
        self.step_s = 0.0
        self._last_steps_s: deque[float] = deque(maxlen=LAST_STEPS)
        self.cpu_clock = cpu_clock
        self.tokens = 0
        self.drops = drops
        # Tokens in this peer's share, for runs that weigh by it; set before training begins.
        self.shard_tokens = 0
        self._is_pairwise = run.is_pairwise
        # With pairwise steps each peer has moments of its own, and rounds, which are plain averages, agree on none.
        self._num_moments = 0 if run.is_pairwise else OUTER_OPTIMIZERS[run.outer_optimizer].num_moments
        self._fragment_schedule = run.fragment_schedule
        self._clock = clock
        self._post = post
        self._errors = ErrorLog(logger)
        self._containment = Containment()
        self._last_end_s: float | None = None
        self._rewritten = False
        most_steps = max_age_steps(run.fragment_fraction, run.max_staleness)
        self._merger = Merger(self._fragments.compare, self.inbox, most_steps, cpu_clock, self._tell, self._containment)
        slots_per_step = Walk.of(run.fragment_fraction).per_step if run.fragment_fraction else 0
        self._pusher = Pusher(self._fragments.gather, slots_per_step, cpu_clock, self._containment)
        self._snapshotter = Snapshotter(
            lambda wanted: self._flat_of(wanted.section).read(wanted.buffer), clock, self._containment
        )
        # The landing that was started, whether it may have changed a part of the weights, and for how many seconds it
        # has blocked training so far.
        self._upload: Transfer[None] | None = None
        self._landed_in_part = False
        self._landing_s = 0.0
        # Written by both sides, under the lock.
        self._lock = threading.Lock()
        self._position = Position(run.sync_every, run.total_steps, run.sync_every)
        self._told_due = False
        self._landing: types.Landing | None = None
        # The node's.
        self._listener: types.ExchangeListener | None = None

    def new_state(self, *, lands: bool = False) -> AnchorState:
        """A zero state of the shape that rounds agree on. `lands`: a GPU may copy from its anchor."""
        anchor = self.new_buffer().zero_().numpy() if lands and self._flat.pins else None
        return AnchorState(self.averaged.space.num_blocks, self._num_moments, self.space.num_blocks, anchor)

    def new_buffer(self, section: int | None = None) -> torch.Tensor:
        """Memory for a snapshot: (num_blocks, 64) float32, pinned for weights on a GPU. Any thread may call it.

        Its pages are allocated here, so that the training thread need not do that.
        """
        return self._flat_of(section).buffer()

    def _flat_of(self, section: int | None) -> FlatTransfers:
        return self._flat if section is None else self._flats[section]

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        """The values of a fragment, in memory that the device can copy from. Any thread may call it."""
        return self._fragments.pin(values)

    def offer_push(self, plan: types.PushPlan) -> None:
        """Set the next slots for the training thread to gather."""
        self._pusher.offer(plan)

    def want_snapshot(self, wanted: types.SnapshotWanted | None) -> None:
        """Request a snapshot at the next due step. None withdraws the request, and drops a snapshot already taken."""
        self._snapshotter.want(wanted)

    def land(self, landing: types.Landing) -> None:
        """Set a resolved round to take effect in the next step."""
        with self._lock:
            assert self._landing is None, "one round lands at a time"
            self._landing = landing

    @property
    def landing_pending(self) -> bool:
        """Whether a resolved round waits for the next step."""
        return self._landing is not None

    def attach(self, listener: types.ExchangeListener) -> None:
        """Deliver events to a node, on its thread, until `detach`."""
        self._listener = listener

    def detach(self) -> None:
        """Deliver no more events, and forget the node's requests. A landing that was set still lands."""
        self._listener = None
        self.want_snapshot(None)
        self._pusher.offer(None)
        with self._lock:
            self._told_due = False

    @property
    def snapshot_delay_s(self) -> float:
        """From the step that takes a snapshot to the one that hands it over: a step on a GPU, else nothing."""
        return self.step_s if self._flat.pins else 0.0

    @property
    def merge_cpu_s(self) -> float:
        """CPU seconds of merging the last fragment."""
        return self._merger.cpu_s

    @property
    def steps(self) -> int:
        """Inner steps since this peer joined."""
        return self._position.steps

    @property
    def run_step(self) -> int:
        """Position in the run, in steps of the run."""
        return self._position.run_step

    @property
    def at_length(self) -> bool:
        return self._position.at_length

    @property
    def due(self) -> bool:
        return self._position.due

    @property
    def round_due(self) -> bool:
        """Whether a round is due. With pairwise steps there is only a round at the end of the run."""
        return self._position.at_length if self._is_pairwise else self._position.due

    @property
    def sync_every(self) -> int:
        """This peer's own H until the next round."""
        return self._position.sync_every

    @property
    def of_interval(self) -> float:
        """Completed fraction of the interval between two outer steps; above 1 if this one is overdue."""
        return self._position.of_interval

    @property
    def fragment_rate(self) -> float:
        """Slots that a step pushes on average, by the run's schedule of p."""
        position = self._position
        return fragment_rate(self._fragment_schedule, position.of_interval, position.of_run)

    @property
    def max_age_s(self) -> float:
        """Older fragments do more harm than good: p · delay, in own steps, is at most the run's `max_staleness`."""
        return self._merger.max_age_s(self.step_s)

    def postpone(self) -> None:
        """A round was skipped: the next is due one interval from here."""
        with self._lock:
            self._position = self._position.postponed()
            self._told_due = False

    @interrupt_held()
    def step(self, samples: int) -> types.StepReport:
        """Exchange after one optimizer step. O(pN), except for the two O(N) passes of each round."""
        start = self._clock()
        if self._last_end_s is not None:
            took = start - self._last_end_s
            counted_s = min(took, MOST_LONGEST_STEPS * max(self._last_steps_s, default=took))
            self.step_s = STEP_TIME_DECAY * (self.step_s or took) + (1 - STEP_TIME_DECAY) * counted_s
            self._last_steps_s.append(took)
        with self._lock:
            self._position = self._position.stepped()
        self.tokens += samples
        self._merger.mixed.clear()
        step_slice = Slice(start, self.step_s, self._clock)
        self._land(step_slice)
        merged, skipped, took_plan = 0, dict[str, int](), False
        # No fragment may change the weights that the last round gave to all peers.
        if not self.finished and not self._landed_in_part:
            merged, skipped = self._merger.step(start, self.epoch, self.step_s)
            took_plan = self._pusher.begin(start, self.fragment_rate, self.epoch, self.steps)
        sent = self._push()
        if took_plan:
            self._tell(types.PushBegun(start))
        self._snapshot(step_slice)
        with self._lock:
            becomes_due = self._position.due and not self._told_due
            self._told_due |= becomes_due
        if becomes_due:
            self._tell(types.RoundDue())
        end = self._clock()
        self._last_end_s = end
        report = self._unreported.popleft() if self._unreported else None
        return types.StepReport(sent, merged, skipped, end - start, report, self.finished)

    @property
    def speed(self) -> float:
        """Inner steps per second, as messages have it; 0 before the second step."""
        return min(MAX_SPEED, 1 / self.step_s) if self.step_s > 0 else 0.0

    @interrupt_held()
    def idle(self) -> None:
        """Land a round and take a snapshot without a training step. The next step reports the round.

        Like `step`, it does not wait for transfers: call it again while `under_way`.
        """
        whole = Slice(self._clock(), math.inf, self._clock)
        self._land(whole)
        self._push()
        self._snapshot(whole)

    @interrupt_held()
    def finish_landing(self) -> bool:
        """Land the rest of a round whose first slices have landed. Returns whether all weights are now of one epoch.

        The next step reports the round.
        """
        if self._landed_in_part:
            self._land(Slice(self._clock(), math.inf, self._clock))
        return not self._landed_in_part

    @property
    def under_way(self) -> bool:
        """Whether a transfer is not done, so that its memory must be kept. Never blocks."""
        lands = self._landed_in_part or (self._upload is not None and not self._upload.done)
        return lands or self._snapshotter.under_way or self._merger.under_way or self._pusher.under_way

    def take_changes(self) -> types.Changes:
        """The weights changed by the last step, and by landings since the last call."""
        mixed = self._merger.mixed
        blocks = np.unique(np.concatenate(mixed)) if mixed else np.zeros(0, np.int64)
        changes = types.Changes(self._rewritten, blocks)
        self._rewritten = False
        mixed.clear()
        return changes

    def _land(self, step_slice: Slice) -> None:
        landing = self._landing
        if landing is None:
            return
        start = self._clock()
        if landing.kind != "keep" and not self._apply(landing, step_slice):
            self._landing_s += self._clock() - start
            return
        self.tokens = 0 if landing.kind == "write" else max(0, self.tokens - landing.included_tokens)
        self.finished = landing.finished
        with self._lock:
            self.epoch = landing.epoch
            # Counted from the snapshot, so that the duration of a round is not added to each interval.
            self._position = self._position.landed(landing.run_step, landing.sync_every, landing.snapshot_steps)
            self._told_due = False
            self._landing = None
        held_s, self._landing_s = self._landing_s + self._clock() - start, 0.0
        self._tell(types.LandingDone(landing, held_s))
        if landing.report is not None:
            self._unreported.append(landing.report)

    def _apply(self, landing: types.Landing, step_slice: Slice) -> bool:
        """Begin or continue to change the weights by a round. Returns whether that is done."""
        try:
            if self._upload is None:
                assert landing.buffer is not None
                self._upload = self._flat_of(landing.section).land(landing.buffer, adds=landing.kind == "add")
            if not has_ended(self._upload):
                return False
            self._rewritten = True  # even if an error leaves a part for the next step
            self._snapshotter.restart()
            # The weights of a run's last round must not be trained on between two slices.
            self._landed_in_part = not step_slice.finish(self._upload, -math.inf if landing.finished else math.inf)
        except Exception as error:
            self.landing_error = error
            self._containment.note(f"landing round {landing.epoch.round}", "it is tried again at each step", error)
            self._landed_in_part = self._upload is not None
            return False
        if not self._landed_in_part:
            self._upload = self.landing_error = None
        return not self._landed_in_part

    def _push(self) -> int:
        """Hand over what was gathered and has arrived in host memory, in order. Returns how many."""
        arrived = self._pusher.take_arrived()
        for push in arrived:
            self._tell(push)
        return len(arrived)

    def _snapshot(self, step_slice: Slice) -> None:
        if self._upload is None:  # a round that is landing comes first, so that the snapshot has its epoch
            self._snapshotter.begin(step_slice.began_s, lambda: self._position, self.epoch, self.tokens)
        if (arrived := self._snapshotter.take_arrived(step_slice)) is None:
            return
        self._tell(types.SnapshotTaken(*arrived))

    def _tell(self, event: types.ExchangeEvent) -> None:
        """Post an event to the node. Exceptions there are logged once."""

        def deliver() -> None:
            # A snapshot may have been withdrawn or replaced while the weights were read.
            if isinstance(event, types.SnapshotTaken) and not self._snapshotter.is_wanted(event.wanted):
                return
            if self._listener is not None:
                with self._errors.containing(f"delivering {type(event).__name__}"):
                    self._listener.receive(event)

        self._post(deliver)
