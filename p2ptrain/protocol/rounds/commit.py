"""Applying a committed round: the outer step on anchor and moments, and the landing in the weights.

The functions compute; `Committer` calls them, one round at a time, and passes the landing to the training thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio

from p2ptrain.algorithms.averaging import MAX_MEAN, is_within
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step
from p2ptrain.errors import WireError
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Landing, RoundReport
from p2ptrain.protocol.rounds.averaging.strategy import Averaging, Blobs
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.contribution import OwnContribution
from p2ptrain.protocol.rounds.grid import chunk_bounds
from p2ptrain.protocol.rounds.policy import MAX_CONTRIBUTORS
from p2ptrain.protocol.rounds.quorum import voters_of
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker, Spent
from p2ptrain.protocol.wire.messages import Head, Record
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# Delay and number of retries of an outer step after an error; the anchor is locked meanwhile (guess).
STEP_RETRY_S, STEP_RETRIES = 1.0, 2


def check_record(record: Record, state: AnchorState, averaging: Averaging) -> None:
    """Raises WireError unless the outer step of this record can be taken on this state."""
    if not record.contributors:
        raise WireError("a record without contributors")
    contributors = {contributor.peer_id for contributor in record.contributors}
    if len(contributors) < len(record.contributors) or max(len(contributors), len(record.parts)) > MAX_CONTRIBUTORS:
        raise WireError(f"a record whose contributors are not distinct, or more than {MAX_CONTRIBUTORS}, as its parts")
    averaging.check_record(record, state.num_blocks)
    optimizer = OUTER_OPTIMIZERS.get(record.outer_optimizer)
    if optimizer is None or optimizer.num_moments > len(state.moments):
        raise WireError(f"a record with outer optimizer {record.outer_optimizer!r}")


def check_decodes(averaging: Averaging, record: Record, blobs: Blobs, span: tuple[int, int]) -> None:
    """Raises WireError unless every chunk of a span decodes to values that leave anchor and moments finite.

    Called before READY, so that the step cannot fail. All peers decode the same bits, so all decide the same.
    """
    for start, stop in chunk_bounds(*span):
        if not is_within(averaging.decode(record, blobs, start, stop), MAX_MEAN):
            raise WireError(f"the mean outer gradient has values beyond {MAX_MEAN:g}")


@dataclass(slots=True)
class Progress:
    """Progress of a record's outer step, to resume it after an error.

    `stepped` blocks are done; `landing` is set once the training thread has it.
    """

    record: Record
    stepped: int = 0
    landing: Landing | None = None


def step_chunks(
    state: AnchorState, averaging: Averaging, progress: Progress, blobs: Blobs, span: tuple[int, int],
    buffer: np.ndarray | None,
) -> None:  # fmt: skip
    """Take the outer step on the rest of a span of blocks, in place: A, m ← step(A, m, mean).

    Args:
        progress: holds the record; updated.
        blobs: the bytes that the record names, already verified by hash.
        buffer: a contributor's (num_blocks, 64), to which A′ − A is added; blocks that are only averaged become A′.
    """
    record = progress.record
    for low, high in chunk_bounds(*span):
        if low < progress.stepped:
            continue
        gradient = averaging.decode(record, blobs, low, high)
        stepped = max(low, min(high, state.num_stepped))
        anchor, averaged = state.anchor[low:stepped], state.anchor[stepped:high]
        before = anchor.copy()
        outer_step(
            record.outer_optimizer, anchor, [moment[low:stepped] for moment in state.moments],
            gradient[: stepped - low], lr=record.outer_lr, momentum=record.outer_momentum, round_=record.round,
        )  # fmt: skip
        np.subtract(averaged, gradient[stepped - low :], out=averaged)
        if buffer is not None:
            buffer[low:stepped] += np.subtract(anchor, before, out=before)
            buffer[stepped:high] = averaged
        progress.stepped = high


def head_of(record: Record, state: AnchorState) -> Head:
    """The head after a record's outer step."""
    return Head(
        record.genesis, record.lineage, record.round, state.hashes.state, state.hashes.anchor, voters_of(record),
        record.run_step, record.tokens_total, record,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """Our part in a committed round.

    Attributes:
        own: our contribution, or None.
        included: whether it is in the mean.
        missed_rounds: in a row, including this one.
        outstanding_tokens: trained on since we were last included.
        reason: why we sat it out; empty if we did not choose to.
    """

    own: OwnContribution | None
    included: bool
    missed_rounds: int
    outstanding_tokens: int
    spent: Spent
    reason: str


def landing(run: RunConfig, record: Record, state: AnchorState, peer_id: PeerId, share: Share) -> Landing:
    """The landing of a round in this peer's weights.

    A contributor takes the agreed change and keeps its quantisation error: θ += A′ − A + decode(own sent bytes). A peer
    that was left out continues from its own weights (DiLoCo, section 3.1, figure 8); left out more than
    `max_missed_rounds` times in a row, it adopts the anchor and discards its own progress. After the run's last round
    all adopt the anchor.
    """
    kind, buffer, own, included = "keep", None, share.own, share.included
    finished = 0 < run.total_steps <= record.run_step
    overwrite = not included and (finished or share.missed_rounds > run.max_missed_rounds)
    if included and own is not None:
        kind, buffer = "add", own.buffer
    elif overwrite:
        kind, buffer = "write", state.anchor_tensor()
    report = RoundReport(
        round=record.round,
        status="committed" if len(record.contributors) > 1 else "solo",
        lineage=record.lineage,
        contributors=tuple(c.peer_id for c in record.contributors),
        bytes_sent=share.spent.bytes_sent,
        bytes_received=share.spent.bytes_received,
        late=not included,
        parent_sha256=record.parent_sha256,
        wall_s=share.spent.wall_s,
        stall_s=own.held_s if own else 0.0,
        tokens_discarded=share.outstanding_tokens if overwrite else 0,
        cosine=record.cosine,
        mean_norm=record.mean_norm,
        reason="" if included else share.reason,
    )
    return Landing(
        kind=kind,
        buffer=buffer,
        epoch=Epoch(record.lineage, record.round),
        sync_every=dict(record.intervals).get(peer_id, run.sync_every),
        run_step=record.run_step,
        included_tokens=own.tokens if included and own else 0,
        snapshot_steps=own.steps if own else None,
        report=report,
        finished=finished,
    )


class Committer:
    """Applies rounds to the agreed state, one at a time, and passes each to the training thread.

    Attributes:
        lock: held while the state is stepped, replaced or copied.
        stepping: whether the anchor is being replaced and must not be read.
    """

    def __init__(self, context: RoundContext) -> None:
        self.lock = trio.Lock()
        self.stepping = False
        self._context = context
        self._missed_rounds = 0
        self._progress: Progress | None = None
        self._landed = trio.Event()
        self._held_s = 0.0
        context.exchange.on_landed = self._on_landed

    def forget(self) -> None:
        """Drop an interrupted step: the head has changed."""
        self._progress, self.stepping = None, False

    @property
    def interrupted(self) -> bool:
        """Whether an outer step was interrupted by an error: the anchor is between two heads."""
        return self._progress is not None and self._progress.stepped > 0

    async def commit(
        self, record: Record, taker: SnapshotTaker, *, included: bool, stand_at: Callable[[Head], object]
    ) -> RoundReport:
        """Take the outer step of a record whose blobs are all here and decode, and land it.

        Resumes an earlier call for this record that was interrupted by an error.

        Args:
            taker: holds our contribution.
            included: whether it is in the mean.
            stand_at: called once the state is that of the record, before anything else can be decided.

        Returns:
            The report of the round, after it has landed.
        """
        progress = self._progress
        if progress is None or progress.record != record:
            progress = self._progress = Progress(record)
        async with self.lock:
            self.stepping = True
            # Shielded, so that a checkpoint written on leaving is consistent.
            with trio.CancelScope(shield=True):
                outcome = await self._step_surely(progress, taker, included)
                head = head_of(record, self._context.state)
                stand_at(head)
            self.stepping = False
        if not self._landed.is_set():
            await self._landed.wait()
        assert outcome.report is not None
        return dataclasses.replace(
            outcome.report,
            anchor_sha256=head.anchor_sha256,
            state_sha256=head.state_sha256,
            stall_s=outcome.report.stall_s + self._held_s,
        )

    async def _step_surely(self, progress: Progress, taker: SnapshotTaker, included: bool) -> Landing:
        """Take the step, and retry after an unexpected error, as half a step is useless."""
        for _ in range(STEP_RETRIES):
            try:
                return await self._step(progress, taker, included)
            except Exception as error:
                context = self._context
                context.errors.note(f"the outer step of round {progress.record.round} was interrupted", error)
            await trio.sleep(STEP_RETRY_S)
        return await self._step(progress, taker, included)

    async def _step(self, progress: Progress, taker: SnapshotTaker, included: bool) -> Landing:
        context, record, own = self._context, progress.record, taker.own
        buffer = own.buffer.numpy() if own is not None and included else None
        for span in context.averaging.spans(record):
            await context.compute(
                step_chunks, context.state, context.averaging, progress, context.parts.get, span, buffer
            )
        if progress.landing is None:
            if included:
                taker.note_included()
            missed_rounds = 0 if included else self._missed_rounds + 1
            share = Share(own, included, missed_rounds, context.exchange.tokens, taker.spent(), taker.sits_out)
            outcome = landing(context.run, record, context.state, context.peer_id, share)
            # Training continues while the hashes are computed.
            self._hand_over(outcome)
            self._missed_rounds, progress.landing = missed_rounds, outcome
        await context.compute(context.state.rehash)
        context.parts.keep(record)
        return progress.landing

    async def land(self, landing: Landing) -> None:
        """Pass a landing to the training thread and wait until it has taken effect; one at a time."""
        self._hand_over(landing)
        await self._landed.wait()

    def _hand_over(self, landing: Landing) -> None:
        self._landed = trio.Event()
        self._context.exchange.land(landing)

    def _on_landed(self, landing: Landing, held_s: float) -> None:
        self._held_s = held_s
        self._landed.set()
