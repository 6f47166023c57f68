"""Which peers a peer dials, which links it ends, and which peers it forgets. Pure.

In a swarm of up to MAX_DIALLED peers, each links to all others. In a larger one, a member links to the peers of the
next round, if it takes part in it, and to a few others, its neighbours.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.protocol.membership.reachability import is_public
from p2ptrain.protocol.wire.transport import PeerId

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# So long after both can dial each other they are linked again: the longest pause, a third more at random, and the dial.
RELINKED_WITHIN_S = 90.0
# After this many failed dials, a peer without a public address is assumed to be behind another NAT. It is then tried
# rarely, in case it moves into our network.
PRIVATE_DIALS, PRIVATE_RETRY_S = 3, 600.0
# A peer that is no longer announced is forgotten. So many that were linked last and did not leave are kept for a day:
# after an outage, which also empties the DHT, a peer whose initial peers are gone comes back through these.
MAX_LOST, LOST_FOR_S = 16, 24 * 3600.0
# A member links to this many peers. Gossip needs no more, because its partners are uniformly random. A joiner links to
# all known peers, because it must know whether any of them has the run's state.
MAX_DIALLED = 64
# In a larger swarm, a member links to this many peers besides those of the next round, and ends links beyond the second
# number. Random graphs of this degree have short paths (guess).
NEIGHBOURS, MAX_NEIGHBOURS = 16, 24
# In a larger swarm, a member with this many links dials no more peers of the next round.
MAX_ROUND_LINKS = 128
# Dials at the same time. Each dial of a made-up address may take 10 s, so fewer at a time could take minutes.
DIALLED_AT_ONCE = 16
# At most this many of them go to peers of the next round that others named. Names can be made up, and chosen so that
# they are drawn for the round.
NAMED_AT_ONCE = 4
# While more peers wait, the first dial of each is cut short after this. A dial on a slow path (round trip 0.5 s) takes
# less. The next dial is not cut short.
FIRST_DIAL_S = 3.0


@dataclass(slots=True)
class KnownPeer:
    """What we remember of a peer.

    Attributes:
        seen_s: when we last heard of it, from any peer.
        teller: the peer that named it in a heartbeat; empty if it was linked, looked up or is an initial peer.
        found_s: when it was last linked, looked up or given by the user.
        retry_s: seconds from the next dial that fails to the one after it; doubles each time.
        dials: number of dials that ended.
        cut_short: whether its only dial so far ended early, because too many other peers waited to be dialled.
        reached: whether it was ever linked.
        is_ours: whether we opened the last link to it.
        refused: whether it was reached and has other settings or another key.
    """

    maddrs: tuple[str, ...]
    role: str
    seen_s: float
    teller: PeerId = ""
    found_s: float = 0.0
    next_dial_s: float = 0.0
    retry_s: float = FIRST_RETRY_S
    dials: int = 0
    cut_short: bool = False
    reached: bool = False
    is_ours: bool = False
    refused: bool = False

    @property
    def extra_delay_s(self) -> float:
        """Additional delay before the next dial, if the peer was never reached and has no public or relayed address."""
        failed = self.dials >= PRIVATE_DIALS and not self.reached
        return PRIVATE_RETRY_S if failed and not is_public(self.maddrs) else 0.0

    def note_linked(self, now: float, next_dial_s: float) -> None:
        """Note that the peer is linked. If the link ends, it is not dialled before `next_dial_s`."""
        self.seen_s, self.retry_s, self.next_dial_s, self.reached = now, FIRST_RETRY_S, next_dial_s, True
        self.teller, self.found_s = "", now


def lost_peers(idle: Mapping[PeerId, KnownPeer], now: float) -> list[PeerId]:
    """Peers without link or record that are still dialled: of those once linked, the ones linked or looked up last."""
    lost = [peer_id for peer_id, peer in idle.items() if peer.reached and now - peer.found_s <= LOST_FOR_S]
    return sorted(lost, key=lambda peer_id: -idle[peer_id].found_s)[:MAX_LOST]


def forget_order(idle: Mapping[PeerId, KnownPeer]) -> list[PeerId]:
    """The order in which peers are forgotten when there are too many.

    Peers that others named come first, because names can be made up: each time the oldest one of the teller that named
    most of those left. The peers that we found ourselves follow, those found longest ago first.
    """
    newest_first = sorted((p for p in idle if idle[p].teller), key=lambda p: -idle[p].seen_s)
    told: Counter[PeerId] = Counter()
    rank: dict[PeerId, int] = {}
    for peer_id in newest_first:
        rank[peer_id] = told[idle[peer_id].teller]
        told[idle[peer_id].teller] += 1
    named = sorted(newest_first, key=lambda p: (-rank[p], idle[p].seen_s))
    return named + sorted((p for p in idle if not idle[p].teller), key=lambda p: idle[p].found_s)


def in_order(
    due: Collection[PeerId], known: Mapping[PeerId, KnownPeer], chosen: Collection[PeerId], rng: random.Random
) -> list[PeerId]:
    """The peers in the order in which to dial them.

    If there are many, the initial peers come first, then those dialled least often. Among equals the order is random:
    in the order of ids, or of their arrival, made-up records could come before all others.
    """
    ordered = list(due)
    if len(ordered) > DIALLED_AT_ONCE:
        rng.shuffle(ordered)
        ordered.sort(key=lambda p: (p not in chosen, known[p].dials, known[p].cut_short))
    return ordered


def whom_to_dial(
    due: Sequence[PeerId],
    known: Mapping[PeerId, KnownPeer],
    linked: Collection[PeerId],
    dialling: Collection[PeerId],
    of_round: Collection[PeerId],
    rng: random.Random,
) -> list[PeerId]:
    """The peers to dial in a large swarm: those of the next round, then others while we have too few neighbours.

    Of the peers of the round, those that we found ourselves come first, then a few of those that others named.
    """
    found = [peer_id for peer_id in due if peer_id in of_round and not known[peer_id].teller]
    named = [peer_id for peer_id in due if peer_id in of_round and known[peer_id].teller]
    named_now = sum(peer_id in known and bool(known[peer_id].teller) for peer_id in dialling)
    wanted = found + named[: max(0, NAMED_AT_ONCE - named_now)]
    others = [peer_id for peer_id in due if peer_id not in of_round]
    rng.shuffle(others)
    missing = missing_neighbours([known[peer_id] for peer_id in linked if peer_id not in of_round])
    return wanted[: max(0, MAX_ROUND_LINKS - len(linked))] + others[:missing]


def missing_neighbours(neighbours: Collection[KnownPeer]) -> int:
    """How many more neighbours a peer of a large swarm needs besides these.

    It must have dialled at least half of them itself. Otherwise peers that dial it would replace each one that it
    loses.
    """
    own = sum(neighbour.is_ours for neighbour in neighbours)
    return max(NEIGHBOURS - len(neighbours), NEIGHBOURS // 2 - own, 0)


def free_dials(linked: int, dialling: int, most_links: int) -> int:
    """How many dials may start now."""
    return max(0, min(most_links - linked, DIALLED_AT_ONCE) - dialling)


def time_limit_s(peer: KnownPeer, *, is_chosen: bool, due: int) -> float:
    """Seconds that the next dial of a peer may take while `due` peers are due. Initial peers are not cut short."""
    is_first = peer.dials == 0 and not peer.cut_short
    return FIRST_DIAL_S if is_first and not is_chosen and due > DIALLED_AT_ONCE else math.inf


def whom_to_leave(
    neighbours: Collection[PeerId], known: Mapping[PeerId, KnownPeer], in_use: Collection[PeerId], rng: random.Random
) -> list[PeerId]:
    """The neighbours beyond MAX_NEIGHBOURS whose links end in a large swarm, drawn at random.

    Links in use are kept, and up to NEIGHBOURS links that we opened ourselves. Otherwise peers that dial us would in
    time replace those, and we would see no others.
    """
    ours = [peer_id for peer_id in neighbours if known[peer_id].is_ours]
    kept = sorted(ours, key=lambda peer_id: peer_id not in in_use)[:NEIGHBOURS]
    idle = [peer_id for peer_id in neighbours if peer_id not in kept and peer_id not in in_use]
    return rng.sample(idle, min(len(idle), max(0, len(neighbours) - MAX_NEIGHBOURS)))
