"""What a peer remembers of others that it found or that were named to it, and whom it forgets first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.protocol.membership.reachability import is_public
from p2ptrain.protocol.wire.transport import PeerId

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# After this many failed dials, a peer without a public address counts as behind another NAT. It is tried rarely then,
# in case it moves into our network.
PRIVATE_DIALS, PRIVATE_RETRY_S = 3, 600.0


@dataclass(slots=True)
class KnownPeer:
    """What is remembered of a peer.

    Attributes:
        seen_s: time of the last news about it, from any peer.
        teller: the peer that named it in a heartbeat; empty if it was linked, looked up or is an initial peer.
        found_s: when it was last linked, looked up or given by the user.
        retry_s: seconds until the next dial; doubles with every failed one.
        dials: dials that ended.
        cut_short: whether its only dial so far ended early, because too many peers waited for theirs.
        reached: whether it was ever linked.
        is_ours: whether we opened the last link to it.
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

    @property
    def extra_delay_s(self) -> float:
        """Additional delay before the next dial of an unreached peer without a public or relayed address."""
        failed = self.dials >= PRIVATE_DIALS and not self.reached
        return PRIVATE_RETRY_S if failed and not is_public(self.maddrs) else 0.0

    def note_linked(self, now: float, next_dial_s: float) -> None:
        """It is linked. If the link ends, it is not dialled before `next_dial_s`."""
        self.seen_s, self.retry_s, self.next_dial_s, self.reached = now, FIRST_RETRY_S, next_dial_s, True
        self.teller, self.found_s = "", now


def forget_order(idle: Mapping[PeerId, KnownPeer]) -> list[PeerId]:
    """The order in which peers are forgotten when there are too many.

    Peers that others named come first, because names can be made up: each time the oldest one of the teller that named
    most of those left. Then come the peers that we found ourselves, those found longest ago first.
    """
    newest_first = sorted((p for p in idle if idle[p].teller), key=lambda p: -idle[p].seen_s)
    told: Counter[PeerId] = Counter()
    rank: dict[PeerId, int] = {}
    for peer_id in newest_first:
        rank[peer_id] = told[idle[peer_id].teller]
        told[idle[peer_id].teller] += 1
    named = sorted(newest_first, key=lambda p: (-rank[p], idle[p].seen_s))
    return named + sorted((p for p in idle if not idle[p].teller), key=lambda p: idle[p].found_s)
