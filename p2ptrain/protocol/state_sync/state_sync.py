"""Gets this peer the run's state: founds the run, adopts the state when joining, and catches up when behind.

A peer that missed rounds applies their records. If that is impossible, or the lineage is another one, it replaces its
whole state. When two lineages meet, the one with more tokens wins.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from p2ptrain.algorithms.averaging import MAX_GRADIENT, is_within
from p2ptrain.algorithms.indexspace import IndexSpace
from p2ptrain.errors import ConfigError, PeerLostError, TransientError, WireError
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingKind
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.lineage import generation_of, new_lineage
from p2ptrain.protocol.state_sync.transfer import Download, ask_buffers, ask_head
from p2ptrain.protocol.wire.messages import Beat, Head, Record, shown, unpack
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


@dataclass(frozen=True)
class Restored:
    """The state from a checkpoint. It may be newer or older than the swarm's."""

    state: AnchorState
    head: Head
    run_step: int


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
        self._download: Download | None = None
        self._skipped: set[PeerId] = set()
        self._jobs_send, self._jobs = trio.open_memory_channel[tuple[Link | None, str]](1)

    @property
    def status(self) -> str:
        """The activity of a joining peer, for display."""
        return f"downloading state {100 * self._download.progress:.0f} %" if self._download else "joining"

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
            if donors and not self._is_ahead_of(donors[0]):
                await self._adopt(donors)
                return
            if donors or self._should_found(started):
                break
            await trio.sleep(0.1)
        restored = self._restored
        if restored is not None:
            state.copy_from(restored.state)
            engine.found_lineage(restored.head)
            await engine.committer.land(self._arrival("keep", "restored from a checkpoint", restored.run_step))
            return
        context.exchange.averaged.read(state.anchor_tensor())
        await context.compute(check_founding, state.anchor, space)
        await context.compute(state.rehash)
        hashes = state.hashes
        genesis = new_lineage(context.run.digest, -1, context.peer_id, context.incarnation)
        voters = ((context.peer_id, context.incarnation),)
        engine.set_head(Head(genesis, genesis, -1, hashes.state, hashes.anchor, voters, 0, 0, None))
        self.founded = True
        await engine.committer.land(self._arrival("keep", "founded the run", founded=True))

    def _should_found(self, started: float) -> bool:
        """Whether all known peers were dialled, none has a state, and our id is the lowest of the fresh peers."""
        membership, waited_s = self._membership, trio.current_time() - started
        if not membership.looked_up.is_set() or not membership.announced.is_set() or membership.undecided:
            if waited_s > ADOPT_TIMEOUT_S:
                raise TransientError(
                    f"run {self._context.run.run_id!r}: no answer from the DHT for {ADOPT_TIMEOUT_S:.0f} s; "
                    "check the initial peers"
                )
            return False
        fresh = (link.peer_id for link in self._context.links.trainers())
        return waited_s > FOUND_AFTER_S and all(self._context.peer_id <= peer_id for peer_id in fresh)

    def _is_ahead_of(self, donor: Link) -> bool:
        assert donor.beat is not None
        return self._restored is not None and rank_of(self._restored.head) > rank_of(donor.beat)

    def _donors(self) -> list[Link]:
        """Live peers with the best known state, without skipped ones."""
        stateful = [
            (link, link.beat)
            for link in self._context.links.live.values()
            if link.beat and link.beat.lineage and link.peer_id not in self._skipped
        ]
        if not stateful:
            return []
        _, best = max(stateful, key=lambda pair: rank_of(pair[1]))
        return [link for link, beat in stateful if (beat.lineage, beat.round) == (best.lineage, best.round)]

    async def _adopt(self, donors: list[Link]) -> None:
        """Adopt the donors' state. Other donors replace lost ones, and verified chunks are kept.

        Donors that send nothing are skipped if other peers have a state.
        """
        context, restored = self._context, self._restored
        if restored is not None:
            context.state.copy_from(restored.state)
        download = self._download = Download(context, context.state)
        head, progress, progress_s = None, 0, trio.current_time()
        while head is None:
            try:
                self._rng.shuffle(donors)
                asked = await ask_head(context.links, donors[0])
                await download.run(asked, donors)
                self._load_buffers(await ask_buffers(context.links, donors[0]))
                head = asked
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
        self._engine.set_head(head)
        if restored is not None and restored.head.state_sha256 == head.state_sha256:
            landing = self._arrival("keep", "the swarm has the checkpoint's state", restored.run_step)
        else:
            landing = self._arrival("write", "adopted the swarm's state")
        await self._engine.committer.land(landing)

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
            with self._context.errors.containing("catching up"):
                try:
                    if link is None:
                        await self._replace_state(reason)
                    elif not await self._follow_record(link):
                        await self._replace_state("the next round cannot be followed by its record")
                    continue
                except (PeerLostError, WireError) as error:
                    logger.info("catching up failed, will try again: %s", error)
            # The next heartbeat of a partner that is ahead retries. The delay is for partners with false claims.
            await trio.sleep(RETRY_S)

    def on_beat(self, link: Link, beat: Beat) -> None:
        """Start catching up if a partner is ahead of us."""
        head = self._engine.head
        if beat.lineage == head.lineage:
            if beat.round > head.round and not self._engine.committer.resolving:
                self._begin(link, "")
        elif beat.lineage and rank_of(beat) > rank_of(head):
            self._begin(None, f"lineage {shown(beat.lineage)} has more tokens than ours")

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
        await trio.sleep(COMMIT_GRACE_S)
        while not engine.committer.resolving and link.beat is not None and link.beat.lineage == engine.head.lineage:
            lineage, round_ = engine.head.lineage, engine.head.round + 1
            if link.beat.round < round_:
                break
            answer, payload = await self._context.links.request(link, "record", lineage, round_, timeout_s=10.0)
            if not answer.found:
                return False
            record = unpack(Record, payload)
            if (record.lineage, record.round) != (lineage, round_):
                raise WireError("not the requested record")
            head = engine.head
            await engine.adopt_record(link.peer_id, record)
            if engine.head is head:
                return False
        return True

    async def _replace_state(self, reason: str) -> None:
        """Adopt the best known state. Local weights are kept if the genesis is the same, else overwritten.

        Our own rounds go on until the new state is complete and verified, so a false claim does not stop them.
        """
        context, engine = self._context, self._engine
        donors = [donor for donor in self._donors() if donor.beat and rank_of(donor.beat) > rank_of(engine.head)]
        if not donors:
            return
        logger.info("replacing our state: %s", reason)
        head = await ask_head(context.links, donors[0])
        if not engine.history.may_adopt(head):
            # More tokens at a place where we may have voted: no honest donor reports that.
            return
        # A new lineage may begin with the state that we have; otherwise download.
        if head.state_sha256 != engine.head.state_sha256:
            # Into a second state, so that ours remains valid if the download fails.
            self._download = self._download or Download(context, context.state.blank())
            await self._download.run(head, donors)
        async with engine.paused():
            if rank_of(head) <= rank_of(engine.head) or not engine.history.may_adopt(head):
                return
            if head.state_sha256 != engine.head.state_sha256:
                if self._download is None:
                    raise PeerLostError("a round of our own came first")
                context.state.copy_from(self._download.state)
            self._download = None
            kind: LandingKind = "keep" if head.genesis == engine.head.genesis else "write"
            engine.set_head(head)
            await engine.committer.land(self._arrival(kind, reason))

    async def can_restore(self, restored: Restored) -> bool:
        """Whether a checkpoint's state is ahead of ours."""
        return rank_of(restored.head) > rank_of(self._engine.head)

    async def restore(self, restored: Restored) -> None:
        """Return to a checkpoint and found a new lineage. Other peers follow if it ranks highest."""
        async with self._engine.paused():
            self._context.state.copy_from(restored.state)
            self._engine.found_lineage(restored.head)
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


def rank_of(place: Head | Beat) -> tuple[int, int, int, tuple[int, ...]]:
    """Sort key of states: most tokens, then youngest lineage, then latest round, then smallest lineage id."""
    return (
        place.tokens_total,
        generation_of(place.lineage),
        place.round,
        tuple(-ord(character) for character in place.lineage),
    )
