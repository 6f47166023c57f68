"""When a lineage has ended because its voters are gone, and what the next one is called."""

from __future__ import annotations

import hashlib

import trio

from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.quorum import is_quorum
from p2ptrain.protocol.wire.messages import Head
from p2ptrain.protocol.wire.transport import PeerId

# A quorum of voters out of reach for this long, or three intervals, ends the lineage (DESIGN.md, round protocol, 10).
QUORUM_LOST_S = 60.0


class LineageWatch:
    """Keeps the time since a quorum of the head's voters was there."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._seen_s = 0.0

    def excuse(self) -> None:
        """Count from now: we stand at a new head, or were held up ourselves, and nobody could be there for us."""
        self._seen_s = trio.current_time()

    def has_ended(self, head: Head, three_intervals_s: float) -> bool:
        """Whether the voters are gone for good, and it is for us to go on under a new lineage: the lowest id does."""
        voters, present = head.voters, self._liveness.present()
        if is_quorum(present, voters):
            self.excuse()
            return False
        missing = [voter for voter in voters if voter not in present]
        lost_s = trio.current_time() - self._seen_s
        if lost_s <= max(QUORUM_LOST_S, three_intervals_s) and not all(map(self._liveness.is_gone_for_good, missing)):
            return False
        me, _ = self._liveness.own
        return min(peer for peer, _ in present if self._liveness.stands_at(peer, head)) == me


def new_lineage(parent: str, round_: int, founder: PeerId, incarnation: str) -> str:
    """The id of a lineage: its generation, and a hash of what it continues and of who began it when.

    `parent` is the lineage that it continues, or the run digest for a run's first.
    """
    generation = int(parent.split("-")[0]) + 1 if "-" in parent else 0
    return f"{generation}-{hashlib.sha256(f'{parent}/{round_}/{founder}/{incarnation}'.encode()).hexdigest()[:16]}"
