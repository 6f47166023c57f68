"""Announces this peer in the directory, finds other members there and through partners, and links to them.

A record only says where a peer may be dialled. A peer is live while there is a link to it. `neighbours` decides which
peers to dial.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import P2PTrainError, PeerLostError
from p2ptrain.protocol.links.handshake import TRAINER
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership import neighbours
from p2ptrain.protocol.membership.directory import (
    BUCKETS,
    RECORD_TTL_S,
    bucket_of,
    decode_record,
    keep_announced,
    member_key,
)
from p2ptrain.protocol.membership.neighbours import MAX_RETRY_S, KnownPeer, forget_order, lost_peers
from p2ptrain.protocol.membership.reachability import is_public, is_relayed, worth_dialling
from p2ptrain.protocol.membership.swarm_size import SwarmSize
from p2ptrain.protocol.wire.messages import MAX_MADDR_LENGTH, MAX_MADDRS, MAX_PEER_ID
from p2ptrain.protocol.wire.transport import Directory, PeerId

logger = logging.getLogger(__name__)

# Interval of lookups of two keys, which are cheap. Partners' heartbeats also name new peers.
LOOKUP_EVERY_S = 5.0
# Interval of lookups until a member is found, and all keys were looked up after our announcement.
EAGER_LOOKUP_S = 0.5
# For this long, a joiner that is linked with a peer that has the state opens few more links: it needs few donors
# (guess).
FEW_LINKS_S = 5.0
# A link to a neighbour that ended is not opened again for this long: that peer may have too many links.
NEIGHBOUR_RETRY_S, ROUND_PEER_RETRY_S = 30.0, 5.0
# Interval of lookups after the swarm's size has changed, until enough keys are counted again.
COUNT_AGAIN_S = 1.0
# With enough links, lookups become rarer, so that a peer reads about this many records in LOOKUP_EVERY_S.
RECORDS_PER_LOOKUP, MAX_LOOKUP_S = 8.0, 60.0
# How often we check which peers to dial: in a small swarm and while joining, and in a large swarm.
POLL_S, LARGE_POLL_S = 0.2, 1.0
# How often the list of peers to name in Beats is renewed in a large swarm.
LIST_EVERY_S = 1.0
# A peer that is not linked is forgotten this long after we last heard of it.
FORGOTTEN_AFTER_S = 2 * RECORD_TTL_S
# Members remembered. A joiner has to try them all, so it remembers as many as the directory's keys hold.
MAX_KNOWN = 256
MAX_KNOWN_JOINING = 2048
# In a large swarm, looked-up peers leave this many of these places to peers named in Beats, which may not displace
# them: most peers of the next round are found that way.
ROOM_FOR_NAMED = 96


@dataclass(frozen=True, slots=True)
class RoundPeers:
    """Which peers this peer needs links to for its rounds.

    Attributes:
        is_candidate: whether a peer is a voter of the next round, or likely to be drawn for it.
        may_be_candidate: whether it may be one by the estimate of another peer.
        in_round: whether a round is under way, so that no link may end.
    """

    is_candidate: Callable[[PeerId], bool]
    may_be_candidate: Callable[[PeerId], bool]
    in_round: Callable[[], bool] = lambda: False


EVERYBODY = RoundPeers(lambda peer_id: True, lambda peer_id: True)


class Membership:
    """Announces this peer, finds members and links to them."""

    def __init__(
        self,
        links: Links,
        directory: Directory,
        run_id: str,
        me: PeerId,
        maddrs: Callable[[], Sequence[str]],
        rng: random.Random,
        rounds: RoundPeers = EVERYBODY,
        remembered: Collection[PeerId] = (),
    ) -> None:
        """`maddrs` returns our current addresses. `remembered` peers are dialled without a record of them."""
        self.rounds = rounds
        self.known: dict[PeerId, KnownPeer] = {}
        self.looked_up = trio.Event()
        self.announced = trio.Event()
        # All keys were looked up after we were announced: of two peers that start at once, one has found the other.
        self.looked_up_again = trio.Event()
        self._links = links
        self._directory = directory
        self._run_id = run_id
        self._me = me
        self._maddrs = maddrs
        self._rng = rng
        self.size = SwarmSize(BUCKETS)
        self._next_buckets: list[int] = []
        self._began_s = math.inf
        self._listed: list[PeerId] = []
        self._listed_s = -math.inf
        self._told_private = False
        self._chosen = links.chosen
        self._remembered = remembered
        self._dialling: set[PeerId] = set()
        self._ignored_until_s: dict[PeerId, float] = {}
        self._stopped = False
        self._most_known = MAX_KNOWN_JOINING
        self._joining = True
        # Whether a joiner found more peers than it can remember.
        self._overrun = False
        self._looking_up = ErrorLog(logger)

    async def run_forever(self) -> None:
        self._began_s = trio.current_time()
        # The network layer knows the addresses of these. A bootstrap node among them refuses the link.
        for peer_id in sorted({*self._chosen, *self._remembered}):
            self.hint(peer_id, ())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_announced, self._directory, self._run_id, self._me, self._maddrs, self.announced)
            nursery.start_soon(self._discover)
            while not self._stopped:
                with self._looking_up.containing("dialling members"):
                    self._dial(nursery)
                    self._prune()
                await trio.sleep(LARGE_POLL_S if self.is_large else POLL_S)

    @property
    def is_large(self) -> bool:
        """Whether the swarm is so large that we link only to a part of it."""
        return not self._joining and self.size.estimate > neighbours.MAX_DIALLED

    def welcome(self, peer_id: PeerId, maddrs: tuple[str, ...], role: str) -> None:
        """A peer is linked with us."""
        self._ignored_until_s.pop(peer_id, None)
        self.hint(peer_id, maddrs, role)
        if peer_id in self.known:
            self.known[peer_id].is_ours = peer_id in self._dialling
        if is_public(maddrs) and not self._told_private:
            self._tell_if_private(peer_id)

    def hint(self, peer_id: PeerId, maddrs: tuple[str, ...], role: str = TRAINER, *, teller: PeerId = "") -> None:
        """Remember a peer, to dial it later. If there are too many, forget the first in `forget_order`.

        A joiner dials all peers that it finds. It forgets only peers that others named, to make room for one that it
        looked up.

        Args:
            teller: the peer that named this one in a heartbeat. Such a hint displaces neither a peer that we found
                ourselves nor its addresses.
        """
        if peer_id == self._me or not peer_id or len(peer_id) > MAX_PEER_ID:
            return
        now = trio.current_time()
        if self._ignored_until_s.get(peer_id, 0.0) > now:
            return
        self._ignored_until_s.pop(peer_id, None)
        maddrs = tuple(maddr for maddr in maddrs[:MAX_MADDRS] if len(maddr) <= MAX_MADDR_LENGTH)
        member = self.known.get(peer_id)
        if member is not None:
            member.seen_s = now
            if not teller:
                member.teller, member.found_s = "", now
            if member.teller == teller or not member.maddrs:
                member.maddrs = maddrs or member.maddrs
            return
        if len(self.known) >= self._most_known:
            if teller and self.is_large and not self.rounds.is_candidate(peer_id):
                return
            self._overrun = self._overrun or self._joining
            self._make_room(1, is_named=bool(teller))
        if len(self.known) < self._most_known:
            self.known[peer_id] = KnownPeer(maddrs, role, now, teller, now)

    def _make_room(self, count: int, *, is_named: bool = False) -> None:
        """Forget `count` peers without a link. `is_named`: to make room for one that another peer named."""
        if count <= 0 or (is_named and self._joining):
            return
        idle = {peer_id: member for peer_id, member in self.known.items() if self._links.get(peer_id) is None}
        for peer_id in forget_order(idle)[:count]:
            if idle[peer_id].teller or not (is_named or self._joining):
                del self.known[peer_id]

    def _make_room_for_found(self, new: Collection[PeerId]) -> None:
        """Forget peers without a link, so that these new ones fit: first found ones, then of all."""
        found = {peer_id: member for peer_id, member in self.known.items() if not member.teller}
        idle = {p: member for p, member in found.items() if p not in new and self._links.get(p) is None}
        most_found = self._most_known - (ROOM_FOR_NAMED if self.is_large else 0)
        for peer_id in forget_order(idle)[: max(0, len(found.keys() | new) - most_found)]:
            del self.known[peer_id]
        self._make_room(len(self.known.keys() | new) - self._most_known)

    def settle(self) -> None:
        """This peer has the run's state: link only to a part of the swarm from now on, and remember fewer peers."""
        self._joining, self._most_known = False, MAX_KNOWN
        self.size.settle()
        self._make_room_for_found(())

    def stop(self) -> None:
        """Stop dialling, because this peer leaves."""
        self._stopped = True

    def forget(self, peer_id: PeerId) -> None:
        """A peer has left. Ignore its record, which remains for a while. If the peer comes back, it dials us."""
        now = trio.current_time()
        self.known.pop(peer_id, None)
        self._ignored_until_s = {peer: until_s for peer, until_s in self._ignored_until_s.items() if until_s > now}
        self._ignored_until_s[peer_id] = now + FORGOTTEN_AFTER_S

    def awaits(self, peer_ids: Collection[PeerId]) -> bool:
        """Whether one of these is an announced member that has not been dialled yet."""
        return any(peer_id in self.known and self._is_untried(peer_id) for peer_id in peer_ids)

    @property
    def undecided(self) -> bool:
        """Whether the first dial of an announced or remembered peer has not ended: it may have the run's state."""
        untried = any(self._links.get(peer) is None and self._is_untried(peer) for peer in self.known)
        return untried or self._overrun

    def _is_untried(self, peer_id: PeerId) -> bool:
        """Whether no dial of a known peer has ended yet.

        An initial peer without a record does not count: it may be a bootstrap node, which answers no Hello.
        """
        member = self.known[peer_id]
        return member.dials == 0 and (bool(member.maddrs) or peer_id not in self._chosen)

    def sample(self, count: int) -> tuple[tuple[PeerId, tuple[str, ...]], ...]:
        """A few peers to name in a Beat: linked ones, or in a large swarm those of the next round."""
        now = trio.current_time()
        if not self.is_large or now >= self._listed_s + LIST_EVERY_S:
            self._listed, self._listed_s = self._nameable(), now
        named = self._rng.sample(self._listed, min(count, len(self._listed)))
        return tuple((peer_id, self.known[peer_id].maddrs) for peer_id in named if peer_id in self.known)

    def _nameable(self) -> list[PeerId]:
        linked = sorted(peer for peer in self._linked() if self.known[peer].role == TRAINER)
        if not self.is_large:
            return linked
        # Not peers that others only named to us: made-up names would spread.
        since_s = trio.current_time() - FORGOTTEN_AFTER_S
        found = [p for p, peer in self.known.items() if peer.maddrs and not peer.teller and peer.found_s >= since_s]
        return sorted(filter(self.rounds.is_candidate, found)) or linked

    def _linked(self) -> list[PeerId]:
        """Members with a live link, without observers."""
        return [peer for peer in self.known if self._links.get(peer) is not None]

    def _tell_if_private(self, peer_id: PeerId) -> None:
        """Warn if this peer cannot be dialled over the internet, once a public peer was reached."""
        own = self._maddrs()
        direct = [maddr for maddr in own if not is_relayed(maddr)]
        if not own or is_public(direct):
            return
        self._told_private = True
        level, consequence = logging.WARNING, "it has no direct link to other peers behind NAT"
        if len(direct) < len(own):
            level, consequence = logging.INFO, "peers behind NAT reach it through a relay"
        logger.log(
            level,
            "%s is reached over the internet, but this peer has only private addresses (%s): peers outside cannot dial "
            "it, and %s. To change that, forward a port of your router to it and give --announce-maddrs "
            "/ip4/ROUTER/tcp/PORT",
            peer_id,
            ", ".join(maddr.partition("/p2p/")[0] for maddr in direct),
            consequence,
        )

    async def _discover(self) -> None:
        while True:
            was_announced = self.announced.is_set()
            is_new = self._joining and not self.looked_up_again.is_set()
            eager = not self._linked() or (is_new and was_announced)
            buckets = range(BUCKETS) if eager else self._due_buckets()
            done: set[int] = set()
            async with trio.open_nursery() as nursery:
                for bucket in buckets:
                    nursery.start_soon(self._look_up, bucket, done)
            if len(done) == len(buckets):
                self.looked_up.set()
                if eager and was_announced:
                    self.looked_up_again.set()
            await trio.sleep(EAGER_LOOKUP_S if eager or is_new else self._lookup_s())

    def _due_buckets(self) -> set[int]:
        """The keys to look up now: another one each time, and in a small swarm our own too."""
        self._next_buckets = self._next_buckets or self._rng.sample(range(BUCKETS), BUCKETS)
        due = {self._next_buckets.pop()}
        return due if self.is_large else due | {bucket_of(self._me)}

    def _lookup_s(self) -> float:
        """Seconds until the next lookup: more if keys are full, we have enough links and the size is steady."""
        if self.is_large and not self.size.is_counted:
            return COUNT_AGAIN_S
        if not self.is_large or len(self._linked()) < neighbours.NEIGHBOURS:
            return LOOKUP_EVERY_S
        rarer = min(self.size.records_per_key / RECORDS_PER_LOOKUP, self.size.steady)
        return min(MAX_LOOKUP_S, LOOKUP_EVERY_S * max(1.0, rarer))

    async def _look_up(self, bucket: int, done: set[int]) -> None:
        with self._looking_up.containing("looking up members"):
            try:
                found = await self._directory.lookup(member_key(self._run_id, bucket))
            except PeerLostError as error:
                logger.debug("looking up members: %s", error)
                return
            # An identity belongs under one key only.
            of_key = {peer_id: value for peer_id, value in found.items() if bucket_of(peer_id) == bucket}
            records = {peer_id: record for peer_id, value in of_key.items() if (record := decode_record(value))}
            if not self._joining:
                # For all at once. For one after the other, this would be most of the cost of a lookup.
                self._make_room_for_found(records.keys())
            for peer_id, record in records.items():
                self.hint(peer_id, *record)
            linked = {peer_id for peer_id in records if peer_id == self._me or self._links.get(peer_id) is not None}
            # Records that are never dialled are not counted: made-up ones would not lower the share of those reached.
            own = self._maddrs()
            counted = linked | {peer_id for peer_id, (maddrs, _) in records.items() if worth_dialling(own, maddrs)}
            self.size.note_count(bucket, len(counted), len(linked))
            done.add(bucket)

    def _dial(self, nursery: trio.Nursery) -> None:
        """Start dials. `neighbours` decides which."""
        now, is_large, linked = trio.current_time(), self.is_large, self._linked()
        takes_part = is_large and self.rounds.is_candidate(self._me)
        of_round = set(filter(self.rounds.is_candidate, self.known)) if takes_part else set()
        due = neighbours.in_order(self._due(now, of_round), self.known, self._chosen, self._rng)
        dialled, most_links = due, MAX_KNOWN if self._joining else neighbours.MAX_DIALLED
        if is_large:
            # Peers that dialled us and have no state do not count: links to them never end, and they may not be
            # joiners.
            linked = [peer_id for peer_id in linked if self.known[peer_id].is_ours or self._has_state(peer_id)]
            dialled = neighbours.whom_to_dial(due, self.known, linked, self._dialling, of_round, self._rng)
            most_links = neighbours.MAX_ROUND_LINKS + neighbours.NEIGHBOURS
        elif self._joining and now < self._began_s + FEW_LINKS_S and any(map(self._has_state, linked)):
            most_links = neighbours.NEIGHBOURS
        for peer_id in dialled[: neighbours.free_dials(len(linked), len(self._dialling), most_links)]:
            peer = self.known[peer_id]
            timeout_s = neighbours.time_limit_s(peer, is_chosen=peer_id in self._chosen, due=len(due))
            self._dialling.add(peer_id)
            nursery.start_soon(self._dial_one, peer_id, peer, timeout_s)

    def _due(self, now: float, of_round: Collection[PeerId]) -> list[PeerId]:
        """The peers that may be dialled now. Also notes which are linked, and forgets those no longer announced.

        It keeps the `lost_peers`: if no member is announced any more, our own connection may have failed.
        """
        due: list[PeerId] = []
        old = {peer_id: peer for peer_id, peer in self.known.items() if now - peer.seen_s > FORGOTTEN_AFTER_S}
        stale = {peer_id: peer for peer_id, peer in old.items() if self._links.get(peer_id) is None}
        forgotten = stale.keys() - set(lost_peers(stale, now))
        for peer_id, peer in list(self.known.items()):
            if self._links.get(peer_id) is not None:
                retry_s = ROUND_PEER_RETRY_S if peer_id in of_round else NEIGHBOUR_RETRY_S
                peer.note_linked(now, now + retry_s if self.is_large else now)
            elif peer_id in forgotten:
                del self.known[peer_id]
            elif now < peer.next_dial_s + peer.extra_delay_s or peer_id in self._dialling:
                continue
            elif worth_dialling(self._maddrs(), peer.maddrs):
                due.append(peer_id)
            else:
                peer.dials = max(1, peer.dials)
        return due

    def _has_state(self, peer_id: PeerId) -> bool:
        """Whether a peer is linked and reports that it has the run's state."""
        link = self._links.get(peer_id)
        return link is not None and link.beat is not None and bool(link.beat.lineage)

    def _prune(self) -> None:
        """In a large swarm, end links to neighbours that are too many.

        Links to joiners are kept, and links to peers that may need us for the round by their own estimate of the
        swarm's size, as these would link again at once.
        """
        if not self.is_large or self.rounds.in_round():
            return
        we_may, may_be_candidate = self.rounds.may_be_candidate(self._me), self.rounds.may_be_candidate
        linked = [p for p in self._linked() if self._has_state(p) and not (we_may and may_be_candidate(p))]
        links = {peer_id: link for peer_id in linked if (link := self._links.get(peer_id)) is not None}
        in_use = {peer_id for peer_id, link in links.items() if link.is_in_use}
        for peer_id in neighbours.whom_to_leave(links, self.known, in_use, self._rng):
            links[peer_id].close("this peer has enough links")

    async def _dial_one(self, peer_id: PeerId, member: KnownPeer, timeout_s: float) -> None:
        with self._looking_up.containing("dialling members"):
            # A peer that others only named, or that we remember, may not be announced.
            is_hearsay = bool(member.teller) or peer_id in self._remembered
            is_counted = member.dials == 0 and not member.cut_short and not is_hearsay
            member.cut_short = reached = False
            try:
                with trio.move_on_after(timeout_s) as scope:
                    await self._links.connect(peer_id, list(member.maddrs))
                    reached = True
                member.cut_short = scope.cancelled_caught
            except PeerLostError as error:
                logger.debug("cannot reach %s: %s", peer_id, error)
            except P2PTrainError as error:
                # Once a peer: those with other settings are dialled for as long as they are announced.
                logger.log(logging.DEBUG if member.refused else logging.WARNING, "%s", error)
                member.refused = True
            finally:
                if is_counted:
                    self.size.note_dial(reached=reached)
                member.dials += not member.cut_short
                member.next_dial_s = trio.current_time() + member.retry_s * self._rng.uniform(0.7, 1.3)
                member.retry_s = min(MAX_RETRY_S, 2 * member.retry_s)
                self._dialling.discard(peer_id)
