"""Gets this peer the run's state: founds the run, adopts the state when joining, and catches up when behind.

A peer that missed rounds applies their records. If that is impossible, or the lineage is another one, it replaces its
whole state. When two lineages meet, their histories decide (`rounds.history`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from p2ptrain.algorithms.averaging import MAX_GRADIENT, is_within
from p2ptrain.algorithms.indexspace import IndexSpace
from p2ptrain.error_log import innermost
from p2ptrain.errors import ConfigError, PeerLostError, RunMismatchError, TransientError, WireError
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingKind
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.history import History, is_better, leads_to, merged, shared
from p2ptrain.protocol.state_sync.provenance import (
    NO_PINS,
    Pins,
    ask_head,
    ask_history,
    check_founder,
    check_pins,
    is_preferred,
    rank_of,
)
from p2ptrain.protocol.state_sync.transfer import Download, ask_buffers
from p2ptrain.protocol.wire.messages import Beat, Commit, Entry, Head, SignedHead, shown, unpack
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# If no peer has a state for this long, the fresh peer with the lowest id founds the run.
FOUND_AFTER_S = 2.0
# A joiner that receives no state for this long gives up with an error.
ADOPT_TIMEOUT_S = 120.0
# Donors that send nothing for this long are skipped if other peers have another state. A donor that commits a round is
# busy for seconds, even with a large model (guess).
DONOR_PATIENCE_S = 20.0
# A late Commit arrives within this time; then the record is requested.
COMMIT_GRACE_S = 0.2
# Delay between attempts to catch up (guess).
RETRY_S = 2.0
# A joiner waits so long for an initial peer of the user's before it takes the state from others (guess).
CHOSEN_FIRST_S = 5.0
# A partner of another lineage is asked for its history again after this (guess).
COMPARE_EVERY_S = 10.0


@dataclass(frozen=True)
class Restored:
    """The state from a checkpoint, with the history that leads to it. It may be newer or older than the swarm's."""

    state: AnchorState
    head: Head
    run_step: int
    history: History


class StateSync:
    """Brings this peer to the run's newest state. `founded`: whether this peer founded the run."""

    def __init__(
        self,
        engine: RoundDriver,
        membership: Membership,
        *,
        load_buffers: Callable[[bytes], None],
        record: Callable[..., None],
        may_found: bool,
        restored: Restored | None,
        rng: random.Random,
        pins: Pins = NO_PINS,
    ) -> None:
        self.founded = False
        self._engine = engine
        self._context = engine.context
        self._membership = membership
        self._load_buffers = load_buffers
        self._record = record
        self._may_found = may_found
        self._restored = restored
        self._rng = rng
        self._pins = pins
        self._compared_s: dict[PeerId, float] = {}
        self._download: Download | None = None
        self._skipped: set[PeerId] = set()
        self._jobs_send, self._jobs = trio.open_memory_channel[tuple[Link | None, str]](1)

    @property
    def status(self) -> str:
        """The activity of a joining peer, for display."""
        return f"downloading state {100 * self._download.progress:.0f} %" if self._download else "joining"

    @property
    def run_founder(self) -> PeerId:
        """The id of the peer that founded the run; "" before we have its state."""
        genesis = self._engine.history.genesis
        return genesis.founder if genesis is not None else ""

    # At the start.

    async def establish(self) -> None:
        """Get the run's state: the swarm's, our checkpoint's, or a new one.

        Raises ConfigError if there is a state that cannot be downloaded, or if our weights cannot found a run.
        """
        engine, context = self._engine, self._context
        state, space = context.state, context.exchange.averaged.space
        started = trio.current_time()
        while not self._may_found and not engine.head.lineage:
            donors = self._donors()
            if donors and not self._may_choose(started):
                await trio.sleep(0.1)
                continue
            if donors and not await self._is_ahead_of(donors[0]):
                await self._adopt(donors)
                return
            if donors or self._should_found(started):
                break
            await trio.sleep(0.1)
        restored = self._restored
        if restored is not None:
            if restored.history.genesis is not None:
                check_founder(self._pins, restored.history.genesis.founder)
            state.copy_from(restored.state)
            engine.found_lineage(restored.head, restored.history)
            await engine.committer.land(self._arrival("keep", "restored from a checkpoint", restored.run_step))
            return
        if self._pins.anchor or self._pins.founder not in ("", context.peer_id):
            raise TransientError(
                f"run {context.run.run_id!r}: no peer of it answers, and founder or anchor forbid to start another; "
                "check the initial peers"
            )
        context.exchange.averaged.read(state.anchor_tensor())
        await context.compute(check_founding, state.anchor, space)
        await context.compute(state.rehash)
        engine.found_run()
        self.founded = True
        await engine.committer.land(self._arrival("keep", "founded the run", founded=True))

    def _should_found(self, started: float) -> bool:
        """Whether all known peers were dialled, none has a state, and our id is the lowest of the fresh peers."""
        membership, waited_s = self._membership, trio.current_time() - started
        if not membership.looked_up.is_set() or not membership.announced.is_set() or membership.undecided:
            if waited_s > ADOPT_TIMEOUT_S and membership.undecided:
                raise TransientError(
                    f"run {self._context.run.run_id!r}: more peers are announced than could be tried within "
                    f"{ADOPT_TIMEOUT_S:.0f} s, and none has its state; give a member of the run as an initial peer"
                )
            if waited_s > ADOPT_TIMEOUT_S:
                raise TransientError(
                    f"run {self._context.run.run_id!r}: no answer from the DHT for {ADOPT_TIMEOUT_S:.0f} s; "
                    "check the initial peers"
                )
            return False
        fresh = (link.peer_id for link in self._context.links.trainers())
        return waited_s > FOUND_AFTER_S and all(self._context.peer_id <= peer_id for peer_id in fresh)

    def _may_choose(self, started: float) -> bool:
        """Whether a donor may be chosen: initial peers that the user gave come first, if they answer soon."""
        chosen = [link for link in self._context.links.trainers() if link.peer_id in self._context.links.chosen]
        if chosen:
            return any(link.beat for link in chosen)
        awaited = not self._membership.looked_up.is_set() or self._membership.awaits(self._context.links.chosen)
        return not awaited or trio.current_time() - started > CHOSEN_FIRST_S

    async def _is_ahead_of(self, donor: Link) -> bool:
        """Whether our checkpoint goes on from the donor's state, or has more of the voters than its lineage."""
        if self._restored is None:
            return False
        ours = self._restored.history.entries
        try:
            signed = await ask_head(self._context, donor)
            theirs = await ask_history(self._context, donor, signed.head, ours)
        except (PeerLostError, WireError) as error:
            logger.info("comparing the checkpoint with the state of %s: %s", donor.peer_id, error)
            return False
        if shared(ours, theirs) is None:
            logger.warning(
                "the checkpoint is of another start of run %r, or too old to be compared; taking the swarm's state",
                self._context.run.run_id,
            )
            return False
        return not leads_to(ours, signed.head) and not is_better(ours, theirs, ())

    def _donors(self) -> list[Link]:
        """Live peers with the state of the best initial peer, or else of the best of all; without skipped ones."""
        stateful = [
            (link, link.beat)
            for link in self._context.links.live.values()
            if link.beat and link.beat.lineage and link.peer_id not in self._skipped
        ]
        if not stateful:
            return []
        chosen = [pair for pair in stateful if pair[0].peer_id in self._context.links.chosen]
        _, best = max(chosen or stateful, key=lambda pair: rank_of(pair[1]))
        return [link for link, beat in stateful if (beat.lineage, beat.round) == (best.lineage, best.round)]

    async def _adopt(self, donors: list[Link]) -> None:
        """Adopt the donors' state. Other donors replace lost ones, and verified chunks are kept.

        Donors that send nothing are skipped if other peers have a state.
        """
        context, restored = self._context, self._restored
        if restored is not None:
            context.state.copy_from(restored.state)
        download = self._download = Download(context, context.state)
        adopted: SignedHead | None = None
        entries: list[Entry] = []
        progress, progress_s = 0, trio.current_time()
        while adopted is None:
            try:
                self._rng.shuffle(donors)
                signed, entries = await self._fetch(download, donors)
                self._load_buffers(await ask_buffers(context.links, donors[0]))
                adopted = signed
            except RunMismatchError:
                # Not the run that the user wants. Other peers may be of it.
                self._skipped.update(donor.peer_id for donor in donors)
                donors = self._donors()
                if not donors:
                    raise
            except (PeerLostError, WireError) as error:
                logger.info("state download: %s", error)
                if download.done_chunks > progress:
                    progress, progress_s = download.done_chunks, trio.current_time()
                if trio.current_time() - progress_s > DONOR_PATIENCE_S and self._skip(donors):
                    progress, progress_s = 0, trio.current_time()
                if trio.current_time() - progress_s > ADOPT_TIMEOUT_S:
                    raise TransientError(
                        f"run {context.run.run_id!r}: received {download.progress:.0%} of its state, then nothing for "
                        f"{ADOPT_TIMEOUT_S:.0f} s; its peers may be unreachable or gone; try again (last: {error})"
                    ) from None
                await trio.sleep(0.5)
                donors = self._donors() or donors
        self._download = None
        self._skipped.clear()
        self._engine.adopt(adopted, History(adopted.genesis, entries))
        if restored is not None and restored.head.state_sha256 == adopted.head.state_sha256:
            landing = self._arrival("keep", "the swarm has the checkpoint's state", restored.run_step)
        else:
            landing = self._arrival("write", "adopted the swarm's state")
        await self._engine.committer.land(landing)

    async def _fetch(self, download: Download, donors: list[Link]) -> tuple[SignedHead, list[Entry]]:
        """Download the donors' state, and the history that leads to it. Raises PeerLostError, WireError."""
        signed = await ask_head(self._context, donors[0])
        entries: list[Entry] = []

        async def fetch_history() -> None:
            entries.extend(await ask_history(self._context, donors[0], signed.head, ()))
            check_pins(self._pins, signed, entries)

        check_founder(self._pins, signed.genesis.founder)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch_history)
                await download.run(signed.head, donors)
        except* (PeerLostError, WireError, RunMismatchError) as errors:
            raise innermost(errors) from None
        return signed, entries

    def _skip(self, donors: list[Link]) -> bool:
        """Skip these donors if other peers have a state; else returns False."""
        before = set(self._skipped)
        self._skipped.update(donor.peer_id for donor in donors)
        if self._donors():
            logger.warning("%d peers send nothing of the state that they announce; trying other peers", len(donors))
            return True
        self._skipped = before
        return False

    def _arrival(
        self, kind: LandingKind, reason: str, run_step: int | None = None, *, founded: bool = False
    ) -> Landing:
        """The landing of the training thread on our new head; kind "write" replaces its weights by the anchor."""
        head, run = self._engine.head, self._context.run
        run_step = head.run_step if run_step is None else run_step
        self._record(
            "adopt",
            founded=founded,
            founder=self.run_founder,
            reason=reason,
            lineage=head.lineage,
            round=head.round,
            run_step=run_step,
            anchor_sha256=head.anchor_sha256,
            state_sha256=head.state_sha256,
        )
        self._context.links.announce()
        return Landing(
            kind=kind,
            buffer=self._context.state.anchor_tensor() if kind == "write" else None,
            epoch=Epoch(head.lineage, head.round),
            sync_every=run.sync_every,
            run_step=run_step,
            included_tokens=0,
            snapshot_steps=None,
            report=None,
            finished=0 < run.total_steps <= head.run_step,
        )

    # During the run.

    async def keep_up(self) -> None:
        """Catch up with peers that are ahead, one job at a time, until cancelled."""
        async for link, reason in self._jobs:
            head = self._engine.head
            with self._context.errors.containing("catching up"):
                try:
                    if link is None or not await self._follow_record(link):
                        await self._replace_state(link, reason)
                except PeerLostError as error:
                    logger.info("catching up failed, will try again: %s", error)
            # The next heartbeat of a partner that is ahead retries. The delay is for partners with false claims.
            if self._engine.head is head:
                await trio.sleep(RETRY_S * self._rng.uniform(0.5, 1.5))  # not in step with the rounds

    def on_beat(self, link: Link, beat: Beat) -> None:
        """Start catching up if a partner is ahead of us, and compare histories if its lineage is another."""
        head, now = self._engine.head, trio.current_time()
        if beat.lineage == head.lineage:
            if beat.round > head.round and not self._engine.committer.resolving:
                self._begin(link, "the next round cannot be followed by its record")
        elif beat.lineage and now >= self._compared_s.get(link.peer_id, 0.0):
            self._compared_s = {peer: until_s for peer, until_s in self._compared_s.items() if until_s > now}
            self._compared_s[link.peer_id] = now + COMPARE_EVERY_S
            self._begin(link, f"lineage {shown(beat.lineage)} goes on, ours does not")

    def fall_behind(self, reason: str) -> None:
        """Replace our state, because the records of missed rounds cannot be applied."""
        self._begin(None, reason)

    def _begin(self, link: Link | None, reason: str) -> None:
        # If a job is already waiting, it will see the newest state.
        with contextlib.suppress(trio.WouldBlock):
            self._jobs_send.send_nowait((link, reason))

    async def _follow_record(self, link: Link) -> bool:
        """Apply the records of rounds that a partner has and we lack. False if the next one cannot be applied."""
        engine = self._engine
        if link.beat is None or link.beat.lineage != engine.head.lineage:
            return False
        await trio.sleep(COMMIT_GRACE_S)
        while not engine.committer.resolving and link.beat.lineage == engine.head.lineage:
            lineage, round_ = engine.head.lineage, engine.head.round + 1
            if link.beat.round < round_:
                break
            answer, payload = await self._context.links.request(link, "record", lineage, round_, timeout_s=10.0)
            if not answer.found:
                return False
            head = engine.head
            with self._context.links.containing(link, "following a record"):
                commit = unpack(Commit, payload)
                if (commit.record.lineage, commit.record.round) != (lineage, round_):
                    raise WireError("not the requested record")
                await engine.adopt_commit(link.peer_id, commit)
            if engine.head is head:
                return False
        return True

    async def _replace_state(self, link: Link | None, reason: str) -> None:
        """Adopt the state of a partner, or (None) of the first of all whose history is preferred to ours.

        Local weights are kept if the genesis is the same, else overwritten. Our own rounds go on until the new state is
        complete and verified, so a false claim does not stop them.
        """
        candidates = [link] if link is not None else self._elsewhere()
        for donor in candidates:
            with self._context.links.containing(donor, "comparing histories"):
                try:
                    if await self._replace_from(donor, reason):
                        return
                except PeerLostError as error:
                    logger.info("catching up with %s failed: %s", donor.peer_id, error)

    def _elsewhere(self) -> list[Link]:
        """Live peers with another state than ours, those of our lineage first."""
        head = self._engine.head
        beats = [
            (link, link.beat)
            for link in self._context.links.trainers()
            if link.beat and link.beat.lineage and (link.beat.lineage, link.beat.round) != (head.lineage, head.round)
        ]
        beats.sort(key=lambda pair: (pair[1].lineage == head.lineage, rank_of(pair[1])), reverse=True)
        return [link for link, _ in beats]

    async def _replace_from(self, donor: Link, reason: str) -> bool:
        """Adopt a partner's state, if its history is preferred to ours. Raises PeerLostError, WireError."""
        context, engine = self._context, self._engine
        signed = await ask_head(context, donor)
        head = signed.head
        entries = await ask_history(context, donor, head, engine.history.entries)
        if not self._prefers(head, entries):
            return False
        check_founder(self._pins, signed.genesis.founder)
        logger.info("replacing our state: %s", reason)
        # A new lineage may begin with the state that we have; otherwise download.
        if head.state_sha256 != engine.head.state_sha256:
            # Into a second state, so that ours remains valid if the download fails.
            self._download = self._download or Download(context, context.state.blank())
            donors = [
                link
                for link in context.links.trainers()
                if link.beat and (link.beat.lineage, link.beat.round) == (head.lineage, head.round)
            ]
            await self._download.run(head, donors or [donor])
        async with engine.paused():
            if not self._prefers(head, entries):
                return False
            if head.state_sha256 != engine.head.state_sha256:
                if self._download is None:
                    raise PeerLostError("a round of our own came first")
                context.state.copy_from(self._download.state)
            self._download = None
            kind: LandingKind = "keep" if head.genesis == engine.head.genesis else "write"
            engine.adopt(signed, History(signed.genesis, merged(engine.history.entries, entries)))
            await engine.committer.land(self._arrival(kind, reason))
        return True

    def _prefers(self, head: Head, entries: Sequence[Entry]) -> bool:
        """Whether to go on from another head, which a history leads to."""
        engine, here = self._engine, (self._engine.head.lineage, self._engine.head.round)
        # At a place where we may have voted: no honest donor reports that.
        if not engine.past_heads.may_adopt(head):
            return False
        liveness = self._context.liveness
        voters, beats = liveness.present(), liveness.beats().values()
        return is_preferred(
            engine.head, engine.history.entries, head, entries,
            {peer_id for peer_id, incarnation in engine.head.voters if (peer_id, incarnation) in voters},
            has_company=any((beat.lineage, beat.round) == here for beat in beats),
        )  # fmt: skip

    async def can_restore(self, restored: Restored) -> bool:
        """Whether a checkpoint's state is ahead of ours."""
        return self._prefers(restored.head, restored.history.entries)

    async def restore(self, restored: Restored) -> None:
        """Return to a checkpoint and found a new lineage. Other peers follow if it ranks highest."""
        async with self._engine.paused():
            self._context.state.copy_from(restored.state)
            self._engine.found_lineage(restored.head, restored.history)
            await self._engine.committer.land(self._arrival("keep", "restored by the user", restored.run_step))


def check_founding(anchor: npt.NDArray[np.float32], space: IndexSpace) -> None:
    """Raises ConfigError unless a run can be founded with these weights, (num_blocks, 64): every joiner gets them."""
    for name, start, stop in zip(space.names, space.tensor_starts, space.tensor_starts[1:], strict=False):
        values = anchor[start:stop]
        if values.size and not is_within(values, MAX_GRADIENT):
            with np.errstate(invalid="ignore"):
                count = int((~(np.abs(values) <= MAX_GRADIENT)).sum())
            raise ConfigError(
                f"{name}: {count} of its values are NaN, infinite or beyond {MAX_GRADIENT:g}, and a run starts from "
                "finite weights; initialise the model again, or load other weights"
            )
