"""Brings this peer to the run's newest state: at the start (`joining`), and when it has fallen behind.

A peer that missed rounds applies their records. If that is impossible, or if another lineage continues, it replaces its
whole state. When two lineages meet, their histories decide (`rounds.deciding.history`).
"""

from __future__ import annotations

import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from p2ptrain.errors import PeerLostError, RunMismatchError, WireError
from p2ptrain.protocol.exchange.types import LandingKind
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.rounds.deciding.history import History, is_rooted, is_unbroken, merged, shared
from p2ptrain.protocol.rounds.deciding.lineage import is_fresh
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.schedule import FOLLOWING_PATIENCE_S
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.joining import Joining
from p2ptrain.protocol.state_sync.land_state import land_state
from p2ptrain.protocol.state_sync.provenance import (
    NotNowError,
    OvertakenError,
    Pins,
    ask_head,
    ask_heads,
    ask_history,
    delaying_rounds,
    is_preferred,
    is_same,
    rank_of,
)
from p2ptrain.protocol.state_sync.starts import Proof, Starts
from p2ptrain.protocol.state_sync.transfer import Download
from p2ptrain.protocol.wire.messages import Beat, Commit, Entry, Founding, Head, unpack
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# A late Commit arrives within this time. Only after that is the record requested.
COMMIT_GRACE_S = 0.2
# If an attempt to catch up with a partner brings nothing, its heartbeats begin no other attempt for this long, and for
# twice as long each time (guess): it may make false claims.
RETRY_S = 2.0
# The same if our own lineage is the one that continues (guess).
REFUSED_RETRY_S = 10.0
# The same if a round came first (guess): short, because partners delay their next round for us.
OVERTAKEN_RETRY_S = 0.25


class StateSync:
    """Catches up during the run. `joining.establish` comes first."""

    def __init__(
        self,
        driver: RoundDriver,
        joining: Joining,
        *,
        record: Callable[..., None],
        may_found: bool,
        rng: random.Random,
        pins: Pins,
    ) -> None:
        self.joining = joining
        self._driver = driver
        self._context = driver.context
        self._rng = rng
        self._record = record
        self._pins = pins
        self._starts = Starts(driver, joining, may_found=may_found)
        self._download: Download | None = None
        # A peer that is behind right after joining was overtaken once.
        self._times_overtaken = 1
        # When a quorum of our voters was linked last.
        self._quorum_s = -math.inf
        # Outcome of the current job: "refused", "overtaken", "not now", or "".
        self._outcome = ""
        # Waiting jobs by partner ("" for any): the link, the reason, and our head when it was queued.
        self._jobs: OrderedDict[PeerId, tuple[Link | None, str, Head]] = OrderedDict()
        self._wanted = trio.Event()

    async def keep_up(self) -> None:
        """Catch up with peers that are ahead, one job at a time, until cancelled."""
        while True:
            while not self._jobs:
                await self._wanted.wait()
                self._wanted = trio.Event()
            _, (link, reason, stuck_at) = self._jobs.popitem(last=False)
            head, caught_up = self._driver.head, False
            if link is None and head is not stuck_at:
                continue  # an earlier job has brought the rounds that we lacked
            if link is not None and not self._driver.may_follow(link):
                continue  # the same, or this partner's last job brought nothing
            self._outcome = ""
            with self._context.errors.containing("catching up"):
                try:
                    caught_up = link is not None and await self._follow_record(link)
                    caught_up = caught_up or await self._replace_state(link, reason)
                except PeerLostError as error:
                    logger.info("catching up failed, will try again: %s", error)
            is_behind = any(map(self._may_follow, self._context.links.trainers()))
            if (caught_up or self._outcome == "refused") and not is_behind:
                self._times_overtaken = 0
                self._download = None  # we have caught up by records: an incomplete one only takes memory
            elif caught_up or self._outcome == "overtaken":
                # Also if we have the requested state, and are behind again: the next rounds should wait for us.
                self._times_overtaken += 1
            # The next heartbeat of a partner that is ahead retries.
            retry_s = {"refused": REFUSED_RETRY_S, "overtaken": OVERTAKEN_RETRY_S, "not now": OVERTAKEN_RETRY_S}.get(
                self._outcome,
                RETRY_S * self._rng.uniform(0.5, 1.5),  # not in step with the rounds
            )
            if link is not None and not caught_up and self._driver.may_follow(link):
                self._driver.ignore_claims(link, retry_s)
            elif link is None and self._driver.head is head:
                await trio.sleep(retry_s)

    def on_beat(self, link: Link, beat: Beat) -> None:
        """Start catching up if a partner is ahead of us, and compare histories if its lineage is another."""
        head = self._driver.head
        if not self._context.links.chosen and self._has_quorum():  # links count without initial peers only
            self._quorum_s = trio.current_time()
        self._starts.warn_of_other(link, beat)
        if not self._may_follow(link):
            return
        if beat.lineage != head.lineage:
            self._begin(link, f"lineage {shown(beat.lineage)} goes on, ours does not")
        elif not self._driver.committer.resolving:
            self._begin(link, "the next round cannot be followed by its record")

    def _may_follow(self, link: Link) -> bool:
        """Whether a partner claims a state that we could adopt.

        A start that we would not follow is not asked for its head: a refusal would be followed by a pause, in which it
        might become the larger one. Its history is asked for only after that, so the best is assumed.
        """
        beat, head = link.beat, self._driver.head
        if beat is None or not self._driver.may_follow(link):
            return False
        is_other_start = is_fresh(head, self._context.run) and beat.genesis != head.genesis
        return not is_other_start or (
            self._starts.follows(link, beat, "", "unbroken") is not False and not self._is_behind()
        )

    def _is_behind(self) -> bool:
        """Whether peers in our start of the run claim a later state, or another lineage."""
        genesis, links = self._driver.head.genesis, self._context.links.trainers()
        return any(link.beat and link.beat.genesis == genesis and self._driver.may_follow(link) for link in links)

    def fall_behind(self, reason: str) -> None:
        """Replace our state, because the records of missed rounds cannot be applied."""
        self._begin(None, reason)

    def _begin(self, link: Link | None, reason: str) -> None:
        # At most one job of each peer waits, so that no peer can take the turns of others.
        self._jobs[link.peer_id if link is not None else ""] = link, reason, self._driver.head
        self._wanted.set()

    async def _follow_record(self, link: Link) -> bool:
        """Apply the records of rounds that a partner has and we lack. False if the next one cannot be applied."""
        driver = self._driver
        if link.beat is None or link.beat.lineage != driver.head.lineage:
            return False
        await trio.sleep(COMMIT_GRACE_S)
        while not driver.committer.resolving and link.beat.lineage == driver.head.lineage:
            lineage, round_ = driver.head.lineage, driver.head.round + 1
            if link.beat.round < round_:
                break
            answer, payload = await self._context.links.request(link, "record", lineage, round_, timeout_s=10.0)
            if not answer.found:
                return False
            head = driver.head
            with self._context.links.containing(link, "following a record"):
                commit = unpack(Commit, payload)
                if (commit.record.lineage, commit.record.round) != (lineage, round_):
                    raise WireError("not the requested record")
                await driver.adopt_commit(link.peer_id, commit)
            if driver.head is head:
                return False
            self._driver.trust_claims(link.peer_id)
        return True

    async def _replace_state(self, link: Link | None, reason: str) -> bool:
        """Adopt the state of a partner, or (None) of the first peer whose history is preferred to ours.

        Local weights are kept if the genesis or the state is the same, else overwritten. Our rounds, except the
        first, continue until the new state is complete and verified, so a false claim does not stop them.
        """
        for donor in [link] if link is not None else self._elsewhere():
            with self._context.links.containing(donor, "comparing histories"):
                try:
                    if await self._replace_from(donor, reason):
                        self._driver.trust_claims(donor.peer_id)
                        return True
                    self._outcome = "" if self._starts.is_newly_linked(donor) else "refused"
                except (PeerLostError, RunMismatchError) as error:
                    logger.info("catching up with %s failed: %s", donor.peer_id, error)
                    if isinstance(error, NotNowError):
                        self._outcome = "overtaken" if isinstance(error, OvertakenError) else "not now"
        return False

    def _elsewhere(self) -> list[Link]:
        """Live peers with another state than ours, those of our lineage first."""
        head = self._driver.head
        beats = [
            (link, link.beat)
            for link in self._context.links.trainers()
            if link.beat and link.beat.lineage and (link.beat.lineage, link.beat.round) != (head.lineage, head.round)
        ]
        beats.sort(key=lambda pair: (pair[1].lineage == head.lineage, rank_of(pair[1])), reverse=True)
        return [link for link, _ in beats]

    async def _replace_from(self, donor: Link, reason: str) -> bool:
        """Adopt a partner's state, if its history is preferred to ours.

        Raises PeerLostError, RunMismatchError, WireError.
        """
        context, driver = self._context, self._driver
        async with delaying_rounds(context, donor, self._times_overtaken):
            signed = await ask_head(context, donor, self._times_overtaken)
            head = signed.head
            entries = await ask_history(context, donor, head, driver.history.entries)
            proof = await self._proof(donor, head, entries)
            if not self._prefers(donor, signed.genesis.founder, head, entries, proof):
                self._download = None
                return False
            self._check_pins(signed.genesis, entries)
            keeps_weights = head.genesis == driver.head.genesis or head.state_hash == driver.head.state_hash
            kept = "; our weights are kept, and count in the next round" if keeps_weights else ""
            ours, theirs = driver.head.round, head.round
            rounds = f" (round {theirs} instead of {ours})" if theirs != ours >= 0 else ""
            logger.info("replacing our state: %s%s%s", reason, rounds, kept)
            download: Download | None = None  # of this job: one of an earlier job may be incomplete
            # A new lineage may begin with the state that we have; otherwise download.
            if head.state_hash != driver.head.state_hash:
                # Into a second state, so that ours remains valid if the download fails.
                download = self._download = self._download or Download(context, context.state.blank())
                others = [
                    link
                    for link in context.links.trainers()
                    if link.beat
                    and (link.beat.lineage, link.beat.round) == (head.lineage, head.round)
                    and link is not donor
                ]
                await self._run_download(download, head, [donor, *others])
        async with driver.paused():
            is_other_start = head.genesis != driver.head.genesis
            has_left = is_other_start and (donor.beat is None or donor.beat.genesis != head.genesis)
            if has_left or not self._prefers(donor, signed.genesis.founder, head, entries, proof):
                self._download = None
                return False
            run_step: int | None = None
            if head.state_hash != driver.head.state_hash:
                if download is None:
                    raise PeerLostError("a round of our own came first")
                await context.compute(context.state.copy_from, download.state)
            elif context.run.is_pairwise:
                run_step = context.exchange.run_step  # pairwise steps have brought us further than the head's round
            self._download = None
            kind: LandingKind = "keep" if keeps_weights else "write"
            if is_other_start:
                self._starts.joined(donor, signed.genesis.founder)
            driver.adopt(signed, History(signed.genesis, merged(driver.history.entries, entries)))
            if kind == "write":
                context.mean_guard.count_from(context.exchange.steps)
            await land_state(driver, self._record, kind, reason, run_step)
        return True

    async def _run_download(self, download: Download, head: Head, donors: list[Link]) -> None:
        """Download a head's state; that of another start only for FOLLOWING_PATIENCE_S.

        States are downloaded one at a time, so a slow donor would keep us from catching up in our own run.
        """
        if head.genesis == self._driver.head.genesis:
            await download.run(head, donors)
            return
        with self._driver.following(), trio.move_on_after(FOLLOWING_PATIENCE_S) as scope:
            await download.run(head, donors)
        if scope.cancelled_caught:
            raise PeerLostError(f"the state of another start did not come within {FOLLOWING_PATIENCE_S:.0f} s")

    async def _proof(self, donor: Link, head: Head, entries: Sequence[Entry]) -> Proof:
        """What proves the history of another start of the run. Raises as `ask_heads`."""
        if is_rooted(entries, head.genesis):
            # Anybody may show the rounds of a start that its members have given up.
            is_voter = donor.peer_id in {peer_id for peer_id, _ in head.voters}
            return "unbroken" if is_voter and is_unbroken(entries, head.genesis) else "rooted"
        if head.genesis == self._driver.head.genesis or not is_fresh(self._driver.head, self._context.run):
            return ""  # it is not asked for
        links = [link for link in self._context.links.trainers() if link.beat and link.beat.lineage == head.lineage]
        if len(links) < 2:
            return ""  # one alone may be a liar
        self._rng.shuffle(links)
        try:
            _, shown_by_most = await ask_heads(self._context, links, self._times_overtaken, least=2)
        except WireError as error:  # of others than this donor
            raise PeerLostError(f"peers of its lineage: {error}") from error
        if not is_same(head, shown_by_most.head):
            raise PeerLostError(f"most peers of its lineage show another head than {donor.peer_id}")
        return "shown by most"

    def _prefers(self, donor: Link | None, founder: PeerId, head: Head, entries: Sequence[Entry], proof: Proof) -> bool:
        """Whether to go on from a partner's head, or (None) from what our user gave.

        Args:
            founder: who began that run.
            proof: of its history, if it is another start of ours.
        """
        driver = self._driver
        ours = driver.history.entries
        # We may have voted at this position already. No honest donor reports such a head.
        if not driver.past_heads.may_adopt(head):
            return False
        is_other_start = head.genesis != driver.head.genesis and shared(ours, entries) is None
        if is_other_start and is_fresh(driver.head, self._context.run):
            follows = self._starts.follows(donor, head, founder, proof)
            if follows is not None:
                return follows
        # A peer that the user named may have followed a liar. While a quorum goes on with us, we do not need it.
        is_needed = donor is None or not self._has_quorum()
        return is_preferred(
            driver.head,
            ours,
            head,
            entries,
            {peer_id for peer_id, _ in self._voters_here()},
            is_trusted=is_needed and self._starts.is_trusted(donor, head, self._quorum_s),
        )

    def _voters_here(self) -> list[Voter]:
        """The voters of our head that are in our lineage now.

        None once our lineage has ended: any peer that begins the next one is followed, as we would begin one ourselves.
        """
        present = set() if self._driver.has_ended else self._context.liveness.present() - self._driver.given_up
        return [voter for voter in self._driver.head.voters if voter in present]

    def _has_quorum(self) -> bool:
        """Whether other voters go on with us, enough for a round."""
        voters = self._driver.head.voters
        return len(voters) > 1 and is_quorum(self._voters_here(), voters)

    def _check_pins(self, genesis: Founding, entries: Sequence[Entry]) -> None:
        """Raises RunMismatchError unless a history is of the run that the user wants."""
        if shared(self._driver.history.entries, entries) is None:
            self._pins.check(genesis, entries)
        else:  # it continues ours, which may no longer reach back to the pinned record
            self._pins.check_founder(genesis)

    async def can_restore(self, restored: Restored) -> bool:
        """Whether a checkpoint's state is ahead of ours. Raises RunMismatchError if it is of an unwanted run."""
        history = restored.history
        founder = "" if history.genesis is None else history.genesis.founder
        if not self._prefers(None, founder, restored.head, history.entries, ""):
            return False
        if history.genesis is not None:
            self._check_pins(history.genesis, history.entries)
        return True

    async def restore(self, restored: Restored) -> None:
        """Return to a checkpoint and found a new lineage. Other peers follow if its history is preferred to theirs."""
        async with self._driver.paused():
            await self._context.compute(self._context.state.copy_from, restored.state)
            self._driver.found_lineage(restored.head, restored.history, "restored by the user")
            why = "restored by the user"
            await land_state(self._driver, self._record, "keep", why, restored.run_step, restored.tokens)
