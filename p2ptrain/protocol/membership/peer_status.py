"""The other peers of a run, as their heartbeats show them to the people at this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.wire.transport import PeerId

# What a peer says that it does is a few words.
MAX_STATUS = 60


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another live peer.

    Attributes:
        status: what it does, in words; "" before its first beat. Safe to print, though from a stranger.
        step: the run's step that it has reached.
        round: rounds that it has resolved: the number of its next one.
        speed: inner steps per second; 0 while not known.
        rtt_s: round trip to it; 0 while not known.
    """

    peer_id: PeerId
    status: str
    step: int
    round: int
    speed: float
    rtt_s: float


def describe(links: Iterable[Link]) -> list[PeerStatus]:
    """Those at the other ends, by peer id. Only reads what is replaced as a whole, so that any thread may call it."""
    found = []
    for link in links:
        if (beat := link.beat) is None:
            found.append(PeerStatus(link.peer_id, "", 0, 0, 0.0, 0.0))
        else:
            found.append(
                PeerStatus(link.peer_id, shown(beat.status), beat.step, beat.round + 1, beat.speed, link.rtt_s)
            )
    return sorted(found, key=lambda other: other.peer_id)


def shown(text: str) -> str:
    """A stranger's text for a terminal: nothing that moves its cursor, and short."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_STATUS])
