"""Gives a starting peer the run's state: it adopts the swarm's, continues from a checkpoint, or founds the run."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import trio

from p2ptrain.errors import PeerLostError, RunMismatchError, TransientError, WireError
from p2ptrain.protocol.anchor import AnchorState, check_founding
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.nursery import nursery_raising
from p2ptrain.protocol.rounds.deciding.history import History, is_better, leads_to, merged, shared
from p2ptrain.protocol.rounds.deciding.lineage import MAX_TURNS, is_fresh
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.provenance import (
    MOST_ASKED,
    NotNowError,
    OvertakenError,
    Pins,
    ask_head,
    ask_heads,
    ask_history,
    delaying_rounds,
    rank_of,
)
from p2ptrain.protocol.state_sync.transfer import Download, ask_buffers, land_state
from p2ptrain.protocol.wire.messages import Beat, Entry, Head, SignedHead
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# If no peer has a state for this long, the new peer with the lowest id founds the run.
FOUND_AFTER_S = 2.0
# A joiner that receives no state for this long gives up with an error.
ADOPT_TIMEOUT_S = 120.0
# Donors that send nothing for this long are skipped if other peers have another state (guess). A donor that commits a
# round is busy for seconds, even with a large model.
DONOR_PATIENCE_S = 20.0
# A joiner waits this long for the user's initial peers before it takes the state from others (guess).
CHOSEN_FIRST_S = 5.0
# If several peers have checkpoints, each waits this long for every peer with a lower id, which may still compare its
# state with that of others. At most `MAX_TURNS` times, as any peer can claim to have a checkpoint.
RESTORE_TURN_S = 5.0
# Pause between attempts to get a state. A round may come first in any of them.
RETRY_S = 0.1
# The same after donors were lost.
LOST_RETRY_S = 0.5


@dataclass(frozen=True)
class Restored:
    """The state from a checkpoint, with the history that leads to it. It may be newer or older than the swarm's.

    Attributes:
        ours: whether it is the state of this process's last node, which failed. It is not compared with the pins again,
            as the pinned record may be older than the history.
        from_initial_peer: of such a state, whether it came from a peer that the user named.
    """

    state: AnchorState
    head: Head
    run_step: int
    history: History
    ours: bool = False
    from_initial_peer: bool = False


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
        load_buffers: Callable[[bytes], None],
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
        self._load_buffers = load_buffers
        self._may_found = may_found
        self._restored = restored
        self._rng = rng
        self._pins = pins
        self._download: Download | None = None
        self._times_overtaken = 0
        # Peers whose state is not taken: in this lineage, or only at this round of it (if not None).
        self._skipped: set[tuple[PeerId, str, int | None]] = set()
        self._is_ahead = False

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
        driver, context = self._driver, self._context
        state, space = context.state, context.exchange.averaged.space
        started = trio.current_time()
        while not self._may_found and not driver.head.lineage:
            donors = self._donors()
            if donors and not self._may_choose(started):
                await trio.sleep(RETRY_S)
                continue
            if donors and self._restored is not None:
                match await self._compared(donor := self._rng.choice(donors), self._restored):
                    case "ours":
                        self._skip_one(donor, only_now=True)
                        continue
                    case "unknown":
                        self._skip_one(donor)
                        continue
                    case "not now" if trio.current_time() - started < ADOPT_TIMEOUT_S:
                        await trio.sleep(RETRY_S)
                        continue
                    case "not now":
                        break
            if donors:
                await self._adopt(donors)
                return
            if self._should_found(started):
                break
            await trio.sleep(RETRY_S)
        restored = self._restored
        if restored is not None:
            if restored.history.genesis is not None and not restored.ours:
                self._pins.check(restored.history.genesis, restored.history.entries)
            state.copy_from(restored.state)
            why = "its node failed" if restored.ours else "this peer was restarted, and no other one has a newer state"
            driver.found_lineage(restored.head, restored.history, why)
            await land_state(driver, self._record, "keep", "restored from a checkpoint", restored.run_step)
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

        We found the run if all keys were looked up after our announcement, all known peers were dialled, none has a
        state or a checkpoint, and our id is the lowest. We continue from our checkpoint if all known peers were dialled
        and none has a state, or if their state is older. Peers with checkpoints take turns in the order of ids, and the
        others adopt the lineage of the first one.
        """
        membership, waited_s = self._membership, trio.current_time() - started
        looked_up = membership.looked_up_again.is_set() and not membership.undecided
        if not looked_up and not self._is_ahead:
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
        restoring = [link.peer_id for link in trainers if link.beat and link.beat.genesis and not link.beat.lineage]
        if self._restored is not None:
            lower = sum(peer_id < me for peer_id in restoring)
            return waited_s > FOUND_AFTER_S + RESTORE_TURN_S * min(lower, MAX_TURNS)
        # The peers that we wait for may be liars, so we do not wait for ever; but still in turn.
        lower = sum(link.peer_id < me for link in trainers)
        patience_s = ADOPT_TIMEOUT_S + RESTORE_TURN_S * lower if restoring or lower else FOUND_AFTER_S
        return waited_s > patience_s

    def _may_choose(self, started: float) -> bool:
        """Whether a donor may be chosen now. The user's initial peers come first, if they answer soon."""
        chosen = [link for link in self._context.links.trainers() if link.peer_id in self._context.links.chosen]
        if chosen:
            return any(link.beat for link in chosen)
        if trio.current_time() - started > CHOSEN_FIRST_S:
            return True
        membership = self._membership
        if not membership.looked_up.is_set() or membership.awaits(self._context.links.chosen):
            return False
        # The nearest peer may be a stranger: the others are heard, too, to count them.
        heard = [link.beat is not None for link in self._context.links.trainers()]
        return sum(heard) >= MOST_ASKED or (all(heard) and not membership.undecided)

    async def _compared(self, donor: Link, restored: Restored) -> Literal["ours", "theirs", "unknown", "not now"]:
        """Which state continues: that of our checkpoint, or the donor's. "unknown" if the two cannot be compared.

        "not now" if the donor cannot prove its state at the moment, as it may be about to begin a lineage: ask again.
        """
        ours = restored.history.entries
        try:
            signed = await ask_head(self._context, donor)
            theirs = await ask_history(self._context, donor, signed.head, ours)
        except (PeerLostError, WireError) as error:
            logger.info("comparing the checkpoint with the state of %s: %s", donor.peer_id, error)
            return "not now" if isinstance(error, NotNowError) else "unknown"
        if shared(ours, theirs) is not None:
            if leads_to(ours, signed.head) or is_better(ours, theirs, self._elsewhere(signed.head)):
                return "theirs"
            self._is_ahead = True
            return "ours"
        if self._joins_anew(restored):
            return "theirs"
        if donor.peer_id in self._context.links.chosen:
            logger.warning(
                "the checkpoint is of another start of run %r, or too old to be compared; taking the state of initial "
                "peer %s",
                self._context.run.run_id,
                donor.peer_id,
            )
            return "theirs"
        logger.warning(
            "%s has a state of run %r that does not continue the checkpoint, so it is ignored. If it is your run, give "
            "that peer in --initial-peers",
            donor.peer_id,
            self._context.run.run_id,
        )
        return "unknown"

    def _elsewhere(self, head: Head) -> set[PeerId]:
        """Linked peers that have not gone to a head's lineage: the word of voters of ours counts against it."""
        return {
            link.peer_id for link in self._context.links.trainers() if link.beat and link.beat.lineage != head.lineage
        }

    def _joins_anew(self, restored: Restored) -> bool:
        """Whether a checkpoint counts for no more than joining for the first time, as nothing was averaged yet.

        Not if our user started the run, or the state is that of an initial peer.
        """
        genesis, context = restored.history.genesis, self._context
        started_here = not context.links.chosen and genesis is not None and genesis.founder == context.peer_id
        return is_fresh(restored.head, context.run) and not started_here and not restored.from_initial_peer

    def _donors(self) -> list[Link]:
        """Live peers with the best state that are not skipped: an initial peer's, else that of the largest lineage.

        Of a lineage the round that most of them show: one alone may claim any.
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
        shown = Counter((beat.lineage, beat.round) for _, beat in chosen or stateful)
        _, best = max(
            chosen or stateful,
            key=lambda pair: (linked[pair[1].lineage], shown[pair[1].lineage, pair[1].round], rank_of(pair[1])),
        )
        return [link for link, beat in stateful if (beat.lineage, beat.round) == (best.lineage, best.round)]

    async def _adopt(self, donors: list[Link]) -> None:
        """Adopt the donors' state. Other donors replace lost ones, and verified chunks are kept.

        Donors that fail are skipped if other peers have a state.
        """
        context, restored = self._context, self._restored
        if restored is not None:
            context.state.copy_from(restored.state)
        download = self._download = Download(context, context.state)
        progress, progress_s = 0, trio.current_time()
        while True:
            try:
                self._rng.shuffle(donors)
                # The first donor's head is adopted. The others only give bytes that match its hashes.
                donors.sort(key=lambda donor: donor.peer_id not in context.links.chosen)
                # The user's initial peer is believed alone.
                is_named = donors[0].peer_id in context.links.chosen
                best, adopted = await ask_heads(context, donors[:1] if is_named else donors, self._times_overtaken)
                donors.insert(0, donors.pop(donors.index(best)))
                entries = await self._fetch(download, donors, adopted)
                self._load_buffers(await ask_buffers(context.links, donors[0]))
                break
            except RunMismatchError:
                # The user wants another run, to which other peers may belong.
                self._skip_one(donors[0])
                donors = self._donors()
                if not donors:
                    raise
            except (PeerLostError, WireError) as error:
                logger.info("state download: %s", error)
                self._times_overtaken += isinstance(error, OvertakenError)
                if download.done_chunks > progress:
                    progress, progress_s = download.done_chunks, trio.current_time()
                is_stuck = trio.current_time() - progress_s > DONOR_PATIENCE_S
                if (is_stuck and self._skip(donors)) or (download.failed and self._skip(download.failed)):
                    progress, progress_s = 0, trio.current_time()
                download.failed.clear()
                if trio.current_time() - progress_s > ADOPT_TIMEOUT_S:
                    raise TransientError(
                        f"run {context.run.run_id!r}: received {100 * download.progress:.0f} % of its state, then "
                        f"nothing for {ADOPT_TIMEOUT_S:.0f} s; its peers may be unreachable or gone; try again "
                        f"(last: {error})"
                    ) from None
                await trio.sleep(RETRY_S if isinstance(error, NotNowError) else LOST_RETRY_S)
                donors = self._donors() or donors
        self._download = None
        self._skipped.clear()
        self.from_initial_peer = donors[0].peer_id in context.links.chosen
        self._driver.adopt(adopted, History(adopted.genesis, entries))
        if restored is not None and restored.head.state_hash == adopted.head.state_hash:
            await land_state(
                self._driver, self._record, "keep", "the swarm has the checkpoint's state", restored.run_step
            )
        else:
            await land_state(self._driver, self._record, "write", "adopted the swarm's state")

    async def _fetch(self, download: Download, donors: list[Link], signed: SignedHead) -> list[Entry]:
        """Download the state of the first donor's head, and return its history. Raises PeerLostError, WireError."""
        entries: list[Entry] = []
        restored = self._restored

        async def fetch_history() -> None:
            ours = restored.history.entries if restored is not None else ()
            theirs = await ask_history(self._context, donors[0], signed.head, ours)
            # Their part alone may begin after the pinned record, as it begins at an entry of ours.
            found = merged(ours, theirs)
            self._pins.check(signed.genesis, found)
            is_chosen = donors[0].peer_id in self._context.links.chosen
            may_differ = restored is None or is_chosen or self._joins_anew(restored)
            if not may_differ and shared(ours, theirs) is None:
                raise PeerLostError(f"{donors[0].peer_id}: its history is not that of our checkpoint")
            entries.extend(found)

        self._pins.check_founder(signed.genesis)
        async with (
            delaying_rounds(self._context, donors[0], self._times_overtaken),
            nursery_raising(PeerLostError, WireError, RunMismatchError) as nursery,
        ):
            nursery.start_soon(fetch_history)
            await download.run(signed.head, donors)
        return entries

    def _is_skipped(self, peer_id: PeerId, beat: Beat) -> bool:
        return not self._skipped.isdisjoint({(peer_id, beat.lineage, None), (peer_id, beat.lineage, beat.round)})

    def _skip_one(self, donor: Link, *, only_now: bool = False) -> None:
        """Do not take this peer's state in its lineage, or (`only_now`) until it lands another round."""
        if donor.beat is not None:
            self._skipped.add((donor.peer_id, donor.beat.lineage, donor.beat.round if only_now else None))

    def _skip(self, donors: Collection[Link]) -> bool:
        """Skip these donors, unless no other peer has a state: then returns False."""
        before = set(self._skipped)
        for donor in donors:
            self._skip_one(donor)
        if self._donors():
            logger.warning("%d peers failed to send the state that they announce; trying other peers", len(donors))
            return True
        self._skipped = before
        return False
