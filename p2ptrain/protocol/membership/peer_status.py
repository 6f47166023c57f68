"""Status of the other live peers, from their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another live peer.

    Attributes:
        status: its current activity, in words; "" before its first heartbeat. Safe to print.
        step: its step of the run.
        round: number of its next round.
        speed: inner steps per second; 0 if not known yet.
        rtt_s: round-trip time; 0 if not known yet.
    """

    peer_id: PeerId
    status: str
    step: int
    round: int
    speed: float
    rtt_s: float


def describe(links: Iterable[Link]) -> list[PeerStatus]:
    """Status of the linked peers, sorted by peer id. Any thread may call it."""

    def status(link: Link) -> PeerStatus:
        if (beat := link.beat) is None:
            return PeerStatus(link.peer_id, "", 0, 0, 0.0, 0.0)
        return PeerStatus(link.peer_id, shown(beat.status), beat.step, beat.round + 1, beat.speed, link.flow.rtt_s)

    return sorted(map(status, links), key=lambda peer: peer.peer_id)
