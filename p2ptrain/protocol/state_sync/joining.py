"""Gives a starting peer the run's state: it adopts the swarm's, continues from a checkpoint, or founds the run."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from p2ptrain.errors import PeerLostError, RunMismatchError, TransientError, WireError
from p2ptrain.protocol.anchor import check_founding
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.membership.neighbours import RELINKED_WITHIN_S
from p2ptrain.protocol.nursery import nursery_raising
from p2ptrain.protocol.rounds.deciding.history import History, merged
from p2ptrain.protocol.rounds.deciding.lineage import MAX_TURNS
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.checkpoint import Checkpoint, Restored
from p2ptrain.protocol.state_sync.land_state import land_state
from p2ptrain.protocol.state_sync.provenance import (
    MOST_ASKED,
    SILENT_S,
    NotNowError,
    OvertakenError,
    Pins,
    Silences,
    ask_heads,
    ask_history,
    delaying_rounds,
    rank_of,
)
from p2ptrain.protocol.state_sync.transfer import Download, ModelBuffers, ask_buffers
from p2ptrain.protocol.wire.messages import Beat, Entry, Head, SignedHead
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# If no peer has a state for this long, the new peer with the lowest id founds the run.
FOUND_AFTER_S = 2.0
# A joiner that receives no state for this long gives up with an error.
ADOPT_TIMEOUT_S = 120.0
# Donors that send nothing for this long are skipped if other peers have another state (guess). A donor that commits a
# round is busy for seconds, even with a large model.
DONOR_PATIENCE_S = SILENT_S
# A joiner waits this long for the user's initial peers before it takes the state from others (guess).
CHOSEN_FIRST_S = 5.0
# The same for the directory's answer: before it, only those who have dialled the joiner are known (guess).
LOOK_UP_FIRST_S = 30.0
# If several peers have checkpoints, each waits this long for every peer with a lower id, which may still compare its
# state with that of others. At most `MAX_TURNS` times, as any peer can claim to have a checkpoint.
RESTORE_TURN_S = 5.0
# A peer whose history does not continue our checkpoint is compared with it again after this long: long enough to hear
# all others meanwhile, also where rounds are short (guess).
COMPARE_AGAIN_S = 60.0
# Pause between attempts to get a state. A round may come first in any of them.
RETRY_S = 0.1
# The same after donors were lost.
LOST_RETRY_S = 0.5


class _OtherHistoryError(PeerLostError):
    """A donor's history does not continue our checkpoint."""


class Joining:
    """Establishes the state of a peer when it starts.

    Attributes:
        founded: whether this peer founded the run.
        from_initial_peer: whether its state came from a peer that the user named.
    """

    def __init__(
        self,
        driver: RoundDriver,
        membership: Membership,
        *,
        record: Callable[..., None],
        buffers: ModelBuffers,
        may_found: bool,
        restored: Restored | None,
        rng: random.Random,
        pins: Pins,
    ) -> None:
        self.founded = False
        self.from_initial_peer = restored is not None and restored.from_initial_peer
        self._driver = driver
        self._context = driver.context
        self._membership = membership
        self._record = record
        self._buffers = buffers
        self._may_found = may_found
        self._restored = restored
        self._rng = rng
        self._pins = pins
        self._download: Download | None = None
        self._times_overtaken = 0
        # Peers whose state is not taken in a lineage, and until when.
        self._skipped: dict[tuple[PeerId, str], float] = {}
        self._checkpoint = None if restored is None else Checkpoint(restored, driver.context)
        self._looked_up_s = math.inf
        # For how long the first heartbeats of linked peers were waited for.
        self._unheard_s = 0.0

    @property
    def genesis(self) -> str:
        """The founding of our checkpoint's run, for Beats before we have the run's state; "" without a checkpoint."""
        return self._restored.head.genesis if self._restored is not None else ""

    @property
    def status(self) -> str:
        """What this peer is doing. It changes only twenty times in a download, as each change is a line in a log."""
        return f"downloading state {5 * int(20 * self._download.progress)} %" if self._download else "joining"

    async def establish(self) -> None:
        """Get the run's state: the swarm's, our checkpoint's, or a new one.

        Raises ConfigError if there is a state that cannot be downloaded, or if our weights cannot found a run.
        """
        await self._establish()
        self._restored, self._checkpoint = None, None  # they hold a whole state

    async def _establish(self) -> None:
        driver, context = self._driver, self._context
        state, space = context.state, context.exchange.averaged.space
        started = trio.current_time()
        while not self._may_found and not driver.head.lineage:
            donors = self._donors()
            if donors and not self._may_choose(started):
                await trio.sleep(RETRY_S)
                continue
            if donors and self._checkpoint is not None:
                # Peers that the user named come first: there may be any number of strangers.
                named = [donor for donor in donors if donor.peer_id in context.links.chosen]
                match await self._checkpoint.compare(donor := self._rng.choice(named or donors)):
                    case "ours" | "unknown" | "not now" if trio.current_time() - started >= ADOPT_TIMEOUT_S:
                        break
                    case "ours" | "unknown":
                        self._skip_one(donor, only_now=True)
                        continue
                    case "not now":
                        await trio.sleep(RETRY_S)
                        continue
            if donors:
                if await self._adopt(donors):
                    return
                continue
            if self._should_found(started):
                break
            await trio.sleep(RETRY_S)
        restored = self._restored
        if restored is not None:
            if restored.history.genesis is not None and not restored.ours:
                self._pins.check(restored.history.genesis, restored.history.entries)
            await context.compute(state.copy_from, restored.state)
            why = "its node failed" if restored.ours else "this peer was restarted, and no other one has a newer state"
            driver.found_lineage(restored.head, restored.history, why)
            why = "restored from a checkpoint"
            await land_state(driver, self._record, "keep", why, restored.run_step, restored.tokens)
            return
        if not self._pins.allows_founding(context.peer_id):
            raise TransientError(
                f"run {context.run.run_id!r}: no peer of it answers, and with a ticket, --founder or --anchor it "
                "is not started here; check the initial peers, and whether it has ended"
            )
        context.exchange.averaged.read(state.anchor_tensor())
        await context.compute(check_founding, state.anchor, space)
        await context.compute(state.rehash)
        driver.found_run()
        self.founded = True
        await land_state(driver, self._record, "keep", "founded the run", founded=True)

    def _should_found(self, started: float) -> bool:
        """Whether it is our turn to found the run, or a lineage that continues from our checkpoint.

        We found the run if all keys were looked up after our announcement, all known peers were dialled, each has said
        that it has neither a state nor a checkpoint, and our id is the lowest. We continue from our checkpoint if all
        known peers were dialled and none has a state, or if their state is older. Peers with checkpoints take turns in
        the order of ids, and the others adopt the lineage of the first one.
        """
        membership, waited_s = self._membership, trio.current_time() - started
        looked_up = membership.looked_up_again.is_set() and not membership.undecided
        is_ahead = self._checkpoint is not None and self._checkpoint.is_ahead
        if not looked_up and not is_ahead:
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
        me, trainers = self._context.peer_id, self._context.links.trainers()
        if any(link.beat is None for link in trainers) and waited_s <= ADOPT_TIMEOUT_S:
            self._unheard_s = waited_s
            return False
        restoring = [link.peer_id for link in trainers if link.beat and link.beat.genesis and not link.beat.lineage]
        if self._restored is not None:
            lower = sum(peer_id < me for peer_id in restoring)
            return waited_s - self._unheard_s > FOUND_AFTER_S + RESTORE_TURN_S * min(lower, MAX_TURNS)
        # The peers that we wait for may be liars, so we do not wait for ever; but still in turn.
        lower = sum(link.peer_id < me for link in trainers)
        patience_s = ADOPT_TIMEOUT_S + RESTORE_TURN_S * lower if restoring or lower else FOUND_AFTER_S
        return waited_s > patience_s

    def _may_choose(self, started: float) -> bool:
        """Whether a donor may be chosen now. The user's initial peers come first, if they answer soon."""
        chosen = [link for link in self._context.links.trainers() if link.peer_id in self._context.links.chosen]
        if any(link.beat and link.beat.lineage for link in chosen):
            return True
        if not all(link.beat for link in chosen):
            return False
        membership, now = self._membership, trio.current_time()
        if not membership.looked_up.is_set():
            return now - started > LOOK_UP_FIRST_S
        self._looked_up_s = min(self._looked_up_s, now)
        if now - self._looked_up_s > CHOSEN_FIRST_S:
            return True
        if membership.awaits(self._context.links.chosen):
            return False
        # The nearest peer may be a stranger: the others are heard, too, to count them.
        heard = [link.beat is not None for link in self._context.links.trainers()]
        return sum(heard) >= MOST_ASKED or (all(heard) and not membership.undecided)

    def _donors(self) -> list[Link]:
        """Live peers to take a state from: those with an initial peer's, else all of the largest lineage.

        Of lineages that are as large, the peers of all: they must agree, as any peer may claim any lineage.
        """
        stateful = [
            (link, link.beat)
            for link in self._context.links.live.values()
            if link.beat and link.beat.lineage and not self._is_skipped(link.peer_id, link.beat)
        ]
        if not stateful:
            return []
        chosen = [pair for pair in stateful if pair[0].peer_id in self._context.links.chosen]
        # Peers only claim their tokens, but we count links ourselves.
        linked = Counter(beat.lineage for _, beat in stateful)
        if chosen:
            _, best = max(chosen, key=lambda pair: (linked[pair[1].lineage], rank_of(pair[1])))
            return [link for link, beat in stateful if (beat.lineage, beat.round) == (best.lineage, best.round)]
        return [link for link, beat in stateful if linked[beat.lineage] == max(linked.values())]

    async def _adopt(self, donors: list[Link]) -> bool:
        """Adopt the donors' state. Other donors replace lost ones, and verified chunks are kept.

        Donors that fail are skipped if other peers have a state. Returns False if none is left whose state continues
        our checkpoint.
        """
        context, restored = self._context, self._restored
        if restored is not None:
            await context.compute(context.state.copy_from, restored.state)
        download = self._download = Download(context, context.state)
        progress, progress_s, silences = 0, trio.current_time(), Silences()
        # One alone is believed if the user named it, or if its history must go on from our checkpoint.
        is_checked = self._checkpoint is not None and not self._checkpoint.joins_anew
        while True:
            try:
                self._rng.shuffle(donors)
                donors.sort(key=lambda donor: (donor.peer_id not in context.links.chosen, donor in download.failed))
                asked = donors[:1] if is_checked or donors[0].peer_id in context.links.chosen else donors
                check = self._check_founder
                best, adopted = await ask_heads(context, asked, self._times_overtaken, check=check, silences=silences)
                # Its head is adopted. The others only give bytes that match its hashes.
                donors.insert(0, donors.pop(donors.index(best)))
                entries = await self._fetch(download, donors, adopted)
                await self._load_buffers(download, donors, adopted.head)
                break
            except RunMismatchError:
                # The user wants another run, to which other peers may belong.
                if not self._donors():
                    raise
            except (PeerLostError, WireError) as error:
                logger.info("state download: %s", error)
                self._times_overtaken += isinstance(error, OvertakenError)
                if download.done_chunks > progress:
                    progress, progress_s = download.done_chunks, trio.current_time()
                # Not those that are only busy: a stranger may wait for that.
                stuck = [donor for donor in donors if silences.is_long(donor) or donor in download.failed]
                if trio.current_time() - progress_s > DONOR_PATIENCE_S and stuck and self._skip(stuck):
                    progress, progress_s = 0, trio.current_time()
                if trio.current_time() - progress_s > ADOPT_TIMEOUT_S:
                    raise TransientError(
                        f"run {context.run.run_id!r}: received {100 * download.progress:.0f} % of its state, then "
                        f"nothing for {ADOPT_TIMEOUT_S:.0f} s; its peers may be unreachable or gone; try again "
                        f"(last: {error})"
                    ) from None
                await trio.sleep(RETRY_S if isinstance(error, NotNowError) else LOST_RETRY_S)
                if isinstance(error, _OtherHistoryError) and not self._donors():
                    self._download = None
                    return False
            if not is_checked:
                waits_s = trio.current_time()
                await self._await_lost(donors)
                progress_s += trio.current_time() - waits_s
            donors = self._donors() or donors
        self._download = None
        self._skipped.clear()
        self.from_initial_peer = donors[0].peer_id in context.links.chosen
        self._driver.adopt(adopted, History(adopted.genesis, entries))
        if restored is not None and restored.head.state_hash == adopted.head.state_hash:
            why = "the swarm has the checkpoint's state"
            await land_state(self._driver, self._record, "keep", why, restored.run_step, restored.tokens)
        else:
            await land_state(self._driver, self._record, "write", "adopted the swarm's state")
        return True

    async def _load_buffers(self, download: Download, donors: list[Link], head: Head) -> None:
        """Load the buffers of a donor's model.

        Nothing proves them, so an initial peer or a voter is asked first, and others only if these fail. Raises
        PeerLostError, WireError.
        """
        if not (most_bytes := self._buffers.most_bytes()):
            return
        trusted = {*self._context.links.chosen, *(peer_id for peer_id, _ in head.voters)}
        asked = [donor for donor in donors if donor not in download.failed] or donors
        giver = min(asked, key=lambda donor: donor.peer_id not in trusted)  # of several the first
        try:
            self._buffers.load(await ask_buffers(self._context.links, giver, most_bytes))
        except (PeerLostError, WireError):
            download.failed.add(giver)
            raise

    async def _await_lost(self, earlier: list[Link]) -> None:
        """Wait for donors that are lost, unless more than half are linked, or an initial peer has a state.

        Our line may be down, and a stranger the first to be back. So time counts from when any donor is heard.
        """
        links, began_s, until_s = self._context.links, trio.current_time(), math.inf
        awaited = {
            link.peer_id
            for link in earlier
            if link.beat and not link.left and not self._is_skipped(link.peer_id, link.beat)
        }
        while donors := self._donors():
            if any(donor.last_heard > began_s for donor in donors):
                until_s = min(until_s, trio.current_time() + RELINKED_WITHIN_S)
            linked = [link for link in links.live.values() if link.beat and link.peer_id in awaited]
            is_chosen = any(donor.peer_id in links.chosen for donor in donors)
            if is_chosen or 2 * len(linked) > len(awaited) or not awaited or trio.current_time() >= until_s:
                break
            await trio.sleep(RETRY_S)

    async def _fetch(self, download: Download, donors: list[Link], signed: SignedHead) -> list[Entry]:
        """Download the state of the first donor's head, and return its history. Raises PeerLostError, WireError."""
        entries: list[Entry] = []
        restored = self._restored

        async def fetch_history() -> None:
            ours = restored.history.entries if restored is not None else ()
            try:
                theirs = await ask_history(self._context, donors[0], signed.head, ours)
            except (PeerLostError, WireError):
                download.failed.add(donors[0])
                raise
            # Their part alone may begin after the pinned record, as it begins at an entry of ours.
            found = merged(ours, theirs)
            with self._skipping(donors[0]):
                self._pins.check(signed.genesis, found)
            checkpoint = self._checkpoint
            if checkpoint is not None and checkpoint.continues(donors[0], signed.head, theirs) != "theirs":
                self._skip_one(donors[0], only_now=True)
                raise _OtherHistoryError(f"{donors[0].peer_id}: its history does not continue our checkpoint")
            entries.extend(found)

        async with (
            delaying_rounds(self._context, donors[0], self._times_overtaken),
            nursery_raising(PeerLostError, WireError, RunMismatchError) as nursery,
        ):
            nursery.start_soon(fetch_history)
            await download.run(signed.head, donors)
        return entries

    @contextmanager
    def _skipping(self, donor: Link) -> Iterator[None]:
        """Skip a donor that is not of the run that the user wants."""
        try:
            yield
        except RunMismatchError:
            self._skip_one(donor)
            raise

    def _check_founder(self, donor: Link, signed: SignedHead) -> None:
        with self._skipping(donor):
            self._pins.check_founder(signed.genesis)

    def _is_skipped(self, peer_id: PeerId, beat: Beat) -> bool:
        return trio.current_time() < self._skipped.get((peer_id, beat.lineage), 0.0)

    def _skip_one(self, donor: Link, *, only_now: bool = False) -> None:
        """Do not take this peer's state in its lineage, or (`only_now`) for COMPARE_AGAIN_S."""
        if donor.beat is not None:
            until_s = trio.current_time() + COMPARE_AGAIN_S if only_now else math.inf
            self._skipped[donor.peer_id, donor.beat.lineage] = until_s

    def _skip(self, donors: list[Link]) -> bool:
        """Skip these donors, unless no other peer has a state: then returns False."""
        before = dict(self._skipped)
        for donor in donors:
            self._skip_one(donor)
        if self._donors():
            logger.warning("%d peers failed to send the state that they announce; trying other peers", len(donors))
            return True
        self._skipped = before
        return False
