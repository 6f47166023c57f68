"""Who leads the next attempt at a round: who is due, who leads, and how long the others have to join."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from p2ptrain.protocol.rounds.quorum import Voter, is_quorum
from p2ptrain.protocol.wire.messages import Due, Head
from p2ptrain.protocol.wire.transport import PeerId

# The joining window follows how long past JOINs took, within these bounds (DESIGN.md).
MIN_WINDOW_S = 0.3
MAX_WINDOW_OF_INTERVAL = 0.1
WINDOW_MARGIN = 1.5
# Who reaches most voters leads; should that come to nothing, every third attempt is anybody's.
ANYBODYS_TURN = 3
# A fast peer may be due for the round after one that has not landed here yet.
MAX_ROUNDS_AHEAD = 2
# A Due may name a later attempt than we know of, but not so late that nobody gets there.
MAX_COUNTERS_AHEAD = 8


def leader_order(
    lineage: str, round_: int, counter: int, voters: Iterable[PeerId], others: Iterable[PeerId]
) -> list[PeerId]:
    """Candidates to lead an attempt, best first: voters before others, shuffled anew for each attempt by a hash."""

    def rank(peer_id: PeerId) -> bytes:
        return hashlib.blake2b(f"{lineage}/{round_}/{counter}/{peer_id}".encode(), digest_size=8).digest()

    first = sorted(set(voters), key=rank)
    return first + sorted(set(others) - set(first), key=rank)


class LeaderElection:
    """What one peer knows of who is due. `counter` names the attempt that is expected next."""

    def __init__(self) -> None:
        self.counter = 0
        self._due: dict[int, set[PeerId]] = {}
        self._spreads: deque[float] = deque(maxlen=64)

    def note_due(self, sender: PeerId, due: Due, head: Head) -> bool:
        """A peer says that it is due. Returns whether that is of our round or one soon after."""
        if due.lineage != head.lineage or not 0 < due.round - head.round <= MAX_ROUNDS_AHEAD:
            return False
        self._due.setdefault(due.round, set()).add(sender)
        if due.round == head.round + 1:
            self.counter = max(self.counter, min(due.counter, self.counter + MAX_COUNTERS_AHEAD))
        return True

    def note_spread(self, spread_s: float) -> None:
        """A JOIN came so long after its Call."""
        self._spreads.append(spread_s)

    def begin(self, head: Head, *, same_lineage: bool) -> None:
        """Stand at a new head: forget who was due for earlier rounds."""
        self.counter = 0
        self._due = {n: due for n, due in self._due.items() if same_lineage and n > head.round}

    def skip(self, round_: int) -> None:
        """The round was skipped: everybody is due anew."""
        self._due.pop(round_, None)

    def is_ours(self, own: PeerId, head: Head, present: Collection[Voter], reach: Mapping[PeerId, int]) -> bool:
        """Whether half of the voters are due, and we are the first present peer in the order of leaders.

        Args:
            present: live trainers that we are linked with, and ourselves.
            reach: how many voters each of them is linked with. Behind NAT a peer may not reach all, and whom a leader
                does not reach cannot contribute.
        """
        due = self._due.get(head.round + 1, set())
        due_voters = [voter for voter in head.voters if voter in present and voter[0] in due]
        if 2 * len(due_voters) < len(head.voters) or not is_quorum(present, head.voters):
            return False
        furthest = max(reach.values(), default=0)
        if self.counter % ANYBODYS_TURN != ANYBODYS_TURN - 1:
            present = [voter for voter in present if reach.get(voter[0], 0) == furthest]
        present_voters = [voter[0] for voter in head.voters if voter in present]
        others = [peer for peer, _ in present]
        return leader_order(head.lineage, head.round + 1, self.counter, present_voters, others)[0] == own

    def window_s(self, sync_every: int, step_s: float, speeds: Iterable[float]) -> float:
        """How long peers have to join: 1.5 × the longest of late, within bounds.

        Args:
            sync_every: H of the run.
            step_s: of our own step.
            speeds: of the others, in steps per second; 0 where not known.
        """
        interval_s = sync_every * step_s
        spread_s = WINDOW_MARGIN * max(self._spreads, default=interval_s)
        # Nobody joins before its training thread comes by: room for two steps of the slowest, within reason.
        slowest_s = max((1 / speed for speed in speeds if speed > 0), default=0.0)
        room_s = 2.5 * min(max(slowest_s, step_s), 4 * step_s)
        return max(MIN_WINDOW_S, room_s, min(spread_s, MAX_WINDOW_OF_INTERVAL * interval_s))
