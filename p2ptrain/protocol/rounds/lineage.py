"""When a lineage has ended because its voters are gone, and the id of the next one."""

from __future__ import annotations

import hashlib

from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.quorum import is_quorum
from p2ptrain.protocol.wire.messages import Head
from p2ptrain.protocol.wire.transport import PeerId

# A lineage ends after no quorum of its voters was reachable for this long, or for three intervals.
QUORUM_LOST_S = 60.0


class LineageWatch:
    """Measures the time since a quorum of the head's voters was reachable."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._seen_s = 0.0

    def excuse(self, now: float) -> None:
        """Count from now: after a new head, or after this process was held up."""
        self._seen_s = now

    def has_ended(self, head: Head, three_intervals_s: float, now: float) -> bool:
        """Whether the voters are gone for good, and we have the lowest id and so begin a new lineage."""
        voters, present = head.voters, self._liveness.present()
        if is_quorum(present, voters):
            self.excuse(now)
            return False
        missing = [voter for voter in voters if voter not in present]
        lost_s = now - self._seen_s
        if lost_s <= max(QUORUM_LOST_S, three_intervals_s) and not all(map(self._liveness.is_gone_for_good, missing)):
            return False
        me, _ = self._liveness.own
        return min(peer for peer, _ in present if self._liveness.stands_at(peer, head)) == me


def new_lineage(parent: str, round_: int, founder: PeerId, incarnation: str) -> str:
    """The id of a lineage: its generation, and a hash of its parent lineage (or the run digest), round and founder."""
    generation = int(parent.split("-")[0]) + 1 if "-" in parent else 0
    return f"{generation}-{hashlib.sha256(f'{parent}/{round_}/{founder}/{incarnation}'.encode()).hexdigest()[:16]}"
