"""Applies decided rounds: fetches a record's parts, takes its outer step, and lands it in the weights.

The parts are fetched once, for the attempt that is READY with them and for the Commit. What fails is tried again until
it works, or until the whole state comes from a peer that is ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import trio

from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingKind, RoundReport
from p2ptrain.protocol.os_memory import LARGE_BYTES, release_pages, release_unused
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import RoundContext, RoundEvents
from p2ptrain.protocol.rounds.deciding.record import name_of
from p2ptrain.protocol.rounds.landing.outer_step import Progress, head_of, step_chunk
from p2ptrain.protocol.rounds.moving.audit import Audits
from p2ptrain.protocol.rounds.moving.fetch import RecordFetcher
from p2ptrain.protocol.rounds.moving.part_store import KEEP_ALL_S
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution, SnapshotTaker
from p2ptrain.protocol.wire.messages import Commit, Head, Record

logger = logging.getLogger(__name__)

# Seconds before the first retry of a round that could not be applied, doubled for each further one, and their limit
# (guesses). Retried without end: a memory shortage may end at any time.
RETRY_S, MAX_RETRY_S = 5.0, 60.0
# Retries of an outer step that an error interrupted; the anchor is locked meanwhile (guess).
STEP_RETRY_S, STEP_RETRIES = 1.0, 2
# Chunks that a worker thread hashes at a time, 16 MiB, so that other work gets in between (guess).
CHUNKS_PER_VISIT = 64
# Why we are not a contributor though the record names us.
OLDER_AVERAGED = "others averaged the outer gradient that it sent before it skipped this round"
OTHER_NAMED = "the record names another outer gradient than ours"


class Committer:
    """Applies one decided round at a time.

    Args:
        taker: holds our contribution.
        events: told of each new head, and when a round has landed or failed.

    Attributes:
        fetcher: fetches the parts of proposed and decided records.
        audits: of the rounds that were applied.
        lock: held while the anchor is replaced; hold it to copy a consistent one.
        stepping: whether the anchor is being replaced, so that it must not be read.
        resolving: whether a round is being applied, or the whole state replaced.
    """

    def __init__(self, context: RoundContext, head: Head, taker: SnapshotTaker, events: RoundEvents) -> None:
        self.fetcher = RecordFetcher(context, head)
        self.audits = Audits(context)
        self.lock = trio.Lock()
        self.stepping = self.resolving = False
        self._context = context
        self._taker = taker
        self._events = events
        self._progress: Progress | None = None
        self._head_set = False
        self._retry_delay_s, self._retry_s = RETRY_S, 0.0
        # Rounds in a row that left us out, by section.
        self._missed_rounds: dict[int | None, int] = {}
        self._idle = trio.Event()
        self._idle.set()
        self._landed = trio.Event()
        self._held_s = 0.0

    def begin(self, head: Head) -> None:
        """After a new head: drop what was under way for the one before."""
        self.fetcher.begin(head)
        self._progress, self.stepping, self._retry_delay_s = None, False, RETRY_S

    @property
    def interrupted(self) -> bool:
        """Whether an error interrupted an outer step: the anchor is between two heads."""
        return self._progress is not None and bool(self._progress.stepped)

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Apply nothing while the whole state is replaced; waits for a round that is being applied."""
        while self.resolving:
            await self._idle.wait()
        self._begin()
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False
            self._end()

    def apply(self, commit: Commit) -> None:
        """Apply a decided round in a task. If that fails, the node is told to replace the state."""
        assert not self.resolving
        self._taker.begin()
        self._begin()
        self._context.start_soon(self._apply, commit)

    def retry(self, commit: Commit, now: float) -> None:
        """Try again to apply a decided round, unless it is too soon."""
        if not self.resolving and now >= self._retry_s:
            self.apply(commit)

    def _begin(self) -> None:
        self.resolving, self._idle = True, trio.Event()

    def _end(self) -> None:
        self.resolving = False
        self._idle.set()
        self._events.resolved()

    async def _apply(self, commit: Commit) -> None:
        record = commit.record
        self._head_set = False
        try:
            norms, own = await self.fetcher.fetch(record), self._taker.own
            steps = own.snapshot.steps if own is not None else self._context.exchange.steps
            report = await self._commit(commit)
            self._context.mean_guard.note(norms, steps, has_snapshot=own is not None)
            self._context.start_soon(self._trim_later, record)
            self._context.host.round_ended(report)
        except (RoundFailedError, PeerLostError, WireError) as error:
            self._fail(record, str(error))
        except Exception as error:
            # Our bug. The decision stands, so it is tried again.
            self._context.errors.note(f"applying round {record.round}", error)
            self._fail(record, f"unexpected error: {error!r}")
        finally:
            self._end()

    def _fail(self, record: Record, reason: str) -> None:
        if not self._head_set:
            self._retry_s = trio.current_time() + self._retry_delay_s
            self._retry_delay_s = min(2 * self._retry_delay_s, MAX_RETRY_S)
            self._context.host.fall_behind(f"round {record.round} cannot be adopted: {reason}")

    async def _commit(self, commit: Commit) -> RoundReport:
        """Take the outer step, or the rest of it after an error, and land it. The parts are here and decode."""
        record, context, own = commit.record, self._context, self._taker.own
        name = name_of(record, context.liveness.own, context.averaging)
        # The record may name a contribution from before we skipped this round, which we do not have any more.
        gave = name is not None and self._taker.gave(name)
        included = name is not None and self._taker.includes(name)
        # A leader must not make us discard progress by averaging an old gradient.
        missed_rounds = 0 if gave else self._missed_rounds.get(context.grid.section, 0) + 1
        # A new head forgets them.
        left_out = own if self._taker.sent and name is None else None
        reason = self._taker.sits_out
        if name is not None:
            reason = "" if included else OLDER_AVERAGED if gave else OTHER_NAMED
        # What attempts have begun in worker threads reads our chunks and the anchor.
        await self._taker.unused()
        if self._progress is None or self._progress.record != record:
            # The outer step overwrites our chunks, and takes memory: parts of the round before make room.
            await self.audits.keep(record, own)
            context.parts.keep(record)
            self._progress = Progress(record)
        async with self.lock:
            self.stepping = True
            # Shielded, so that a checkpoint written on leaving is consistent.
            with trio.CancelScope(shield=True):
                landing = await self._step_with_retries(self._progress, included, missed_rounds)
                head = head_of(commit, context.state)
                if own is not None:
                    # Of the last attempt: others may have been held up by their leaders.
                    context.timeouts.note_round(trio.current_time() - self._taker.attempt_from_s)
                self._events.advance(head)
                self._head_set = True
                context.start_soon(self._audit, record)
                context.start_soon(self.audits.expire)
            self.stepping = False
        if reason == OTHER_NAMED:
            logger.warning("round %d: %s", record.round, reason)
        if left_out is not None:
            with context.errors.containing(f"measuring what round {record.round} left out", "the reason is not known"):
                reason = await self._why_left_out(record, left_out)
        if not self._landed.is_set():
            await self._landed.wait()
        assert landing.report is not None
        return dataclasses.replace(
            landing.report,
            anchor_hash=head.anchor_hash,
            state_hash=head.state_hash,
            stall_s=landing.report.stall_s + self._held_s,
            reason=reason,
        )

    async def _step_with_retries(self, progress: Progress, included: bool, missed_rounds: int) -> Landing:
        for _ in range(STEP_RETRIES):
            try:
                return await self._step(progress, included, missed_rounds)
            except Exception as error:
                self._context.errors.note(f"the outer step of round {progress.record.round} was interrupted", error)
            await trio.sleep(STEP_RETRY_S)
        return await self._step(progress, included, missed_rounds)

    async def _step(self, progress: Progress, included: bool, missed_rounds: int) -> Landing:
        context, record, own = self._context, progress.record, self._taker.own
        if context.state.anchor.nbytes >= LARGE_BYTES:
            # What was received lies in freed heap pages; the landing takes new ones.
            await context.compute(release_unused)
        adds = included and not context.run.is_over_at(record.run_step)
        land = functools.partial(own.land, context.codec) if own is not None and adds else None
        step = functools.partial(step_chunk, context.state, context.averaging, progress, context.parts.get, land)
        for span in context.averaging.spans(record):
            await in_parallel(context.compute, step, context.grid.bounds(*span))
        if progress.landing is None:
            if included:
                self._taker.note_included()
            landing = self._landing_of(record, included, missed_rounds)
            self._missed_rounds[context.grid.section] = missed_rounds
            # Training continues while the hashes are computed.
            self._hand_over(landing)
            progress.landing = landing
        numbers, hashes = context.state.chunks_within(context.grid.first, context.grid.end), list[str]()
        at_a_time = CHUNKS_PER_VISIT * context.compute.threads
        for i in range(0, len(numbers), at_a_time):
            hashes += await in_parallel(context.compute, context.state.chunk_hash, numbers[i : i + at_a_time])
        before = context.state.hashes.chunks
        context.state.hashes = context.state.combine([*before[: numbers.start], *hashes, *before[numbers.stop :]])
        return progress.landing

    async def _why_left_out(self, record: Record, own: OwnContribution) -> str:
        """Why our outer gradient, all of which we sent, is not in the mean, as far as we know. Warns of it."""
        context = self._context
        why = "it came too late"
        if context.run.round_guard == "exclude":
            bounds, num_stepped = own.grid.chunks, context.state.num_stepped
            square = await context.compute(own.squared_norm, context.codec, bounds, num_stepped)
            why = f"its norm, {math.sqrt(square):.3g}, is above the limit, or {why}"
        logger.warning("our outer gradient was left out of round %d: %s", record.round, why)
        return f"its outer gradient was left out: {why}"

    def _landing_of(self, record: Record, included: bool, missed_rounds: int) -> Landing:
        """The landing of a round in this peer's weights.

        A contributor takes the agreed change and keeps its quantisation error: θ += A′ − A + decode(own sent bytes). A
        peer that was left out continues from its own weights (DiLoCo, section 3.1, figure 8), and so does one whose
        older outer gradient was averaged. Left out more than `max_missed_rounds` times in a row, it adopts the anchor
        and discards its own progress; left out of the rounds of one section, only there. So does every peer after the
        run's last round: all end with the same weights.
        """
        context, run, taker, own = self._context, self._context.run, self._taker, self._taker.own
        finished = run.is_over_at(record.run_step)
        overwrite = finished or (not included and missed_rounds > run.max_missed_rounds)
        included_tokens = own.snapshot.tokens if included and own is not None else 0
        kind: LandingKind = "keep"
        buffer, section = None, None
        if overwrite:
            grid = context.grid
            kind, buffer, section = "write", context.state.anchor_tensor()[grid.first : grid.end], grid.section
        elif included and own is not None:
            kind, buffer, section = "add", own.snapshot.weights, own.grid.section
            self._warn_without_samples(record)
        spent = taker.spent()
        report = RoundReport(
            round=record.round,
            status="committed" if len(record.contributors) > 1 else "solo",
            lineage=record.lineage,
            contributors=tuple(c.peer_id for c in record.contributors),
            bytes_sent=spent.bytes_sent,
            bytes_received=spent.bytes_received,
            late=not included,
            parent_hash=record.parent_hash,
            record_sha256=record.sha256,
            wall_s=spent.wall_s,
            stall_s=own.snapshot.held_s if own else 0.0,
            tokens_discarded=max(0, context.exchange.tokens - included_tokens) if overwrite else 0,
            cosine=record.cosine,
            mean_norm=record.mean_norm,
        )
        return Landing(
            kind=kind,
            buffer=buffer,
            epoch=Epoch(record.lineage, record.round),
            sync_every=dict(record.intervals).get(context.peer_id, run.sync_every),
            run_step=record.run_step,
            included_tokens=included_tokens,
            snapshot_steps=own.snapshot.steps if own else None,
            report=report,
            finished=finished,
            section=section,
        )

    def _warn_without_samples(self, record: Record) -> None:
        exchange, peer_id = self._context.exchange, self._context.peer_id
        reports_none = not exchange.tokens and exchange.of_interval > 0
        others_report = record.tokens_total > self.fetcher.head.tokens_total
        if self._context.run.round_weights == "tokens" and reports_none and others_report:
            has_weight = any(c.weight for c in record.contributors if c.peer_id == peer_id)
            logger.warning(
                "this peer's training loop reports no samples, and those of other peers do. In round %d %s; pass "
                "`samples` to step()",
                record.round,
                "all outer gradients had the same weight"
                if has_weight
                else "our outer gradient had no weight, so what this peer learned since the last one is lost",
            )

    async def land(self, landing: Landing) -> None:
        """Pass a landing to the training thread and wait until it has taken effect; one at a time."""
        self._hand_over(landing)
        await self._landed.wait()

    def _hand_over(self, landing: Landing) -> None:
        if landing.kind == "write":  # at the anchor, a peer has not drifted
            self._missed_rounds = {} if landing.section is None else self._missed_rounds | {landing.section: 0}
        self._landed = trio.Event()
        self._context.exchange.land(landing)

    def landed(self, landing: Landing, held_s: float) -> None:
        """A round has taken effect in the live weights, which blocked training for `held_s` seconds."""
        self._held_s = held_s
        self._landed.set()
        if landing.kind == "add" and landing.buffer is not None:
            self._context.start_soon(self._release, landing.buffer)

    async def _release(self, landed: torch.Tensor) -> None:
        """Return the memory of what has landed. The round goes on for a while: the new state is still hashed."""
        with self._context.errors.containing("returning the memory of a snapshot", "it is freed later"):
            await self._context.compute(release_pages, landed.numpy())

    async def _audit(self, record: Record) -> None:
        with self._context.errors.containing(f"auditing round {record.round}", "it is not audited"):
            await self.audits.audit()

    async def _trim_later(self, record: Record) -> None:
        parts, until_s = self._context.parts, trio.current_time() + KEEP_ALL_S
        while trio.current_time() < until_s:
            await trio.sleep_until(until_s)
            if not parts.is_last(record):
                return
            until_s = parts.asked_s + KEEP_ALL_S
        parts.trim([self._context.peer_id])
