"""Which peer leads the next attempt at a round, and how long the joining window is."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from p2ptrain.protocol.rounds.quorum import Voter, is_quorum
from p2ptrain.protocol.wire.messages import Due, Head
from p2ptrain.protocol.wire.transport import PeerId

# Bounds of the joining window, which follows the delay of past Joins.
MIN_WINDOW_S = 0.3
MAX_WINDOW_OF_INTERVAL = 0.1
WINDOW_MARGIN = 1.5
# The peer that reaches most voters leads; every third attempt may be led by any live peer.
ANY_LEADER_EVERY = 3
# A fast peer may be due for the round after the one that has not landed here yet.
MAX_ROUNDS_AHEAD = 2
# A Due may name a later attempt than we know of, within this limit.
MAX_COUNTERS_AHEAD = 8


def leader_order(
    lineage: str, round_: int, counter: int, voters: Iterable[PeerId], others: Iterable[PeerId]
) -> list[PeerId]:
    """Candidates to lead an attempt, best first: voters before others, shuffled by a hash for each attempt."""

    def rank(peer_id: PeerId) -> bytes:
        return hashlib.blake2b(f"{lineage}/{round_}/{counter}/{peer_id}".encode(), digest_size=8).digest()

    first = sorted(set(voters), key=rank)
    return first + sorted(set(others) - set(first), key=rank)


class LeaderElection:
    """The peers known to be due. `counter` is that of the attempt expected next."""

    def __init__(self) -> None:
        self.counter = 0
        self._due: dict[int, set[PeerId]] = {}
        self._spreads: deque[float] = deque(maxlen=64)

    def note_due(self, sender: PeerId, due: Due, head: Head) -> bool:
        """Record a Due. Returns whether it is for our round or one soon after."""
        if due.lineage != head.lineage or not 0 < due.round - head.round <= MAX_ROUNDS_AHEAD:
            return False
        self._due.setdefault(due.round, set()).add(sender)
        if due.round == head.round + 1:
            self.counter = max(self.counter, min(due.counter, self.counter + MAX_COUNTERS_AHEAD))
        return True

    def note_spread(self, spread_s: float) -> None:
        """Record the delay between a Call and a Join."""
        self._spreads.append(spread_s)

    def begin(self, head: Head, *, same_lineage: bool) -> None:
        """After a new head: forget Dues of earlier rounds."""
        self.counter = 0
        self._due = {n: due for n, due in self._due.items() if same_lineage and n > head.round}

    def skip(self, round_: int) -> None:
        """The round was skipped: forget its Dues."""
        self._due.pop(round_, None)

    def is_ours(self, own: PeerId, head: Head, present: Collection[Voter], reach: Mapping[PeerId, int]) -> bool:
        """Whether half of the voters are due, and we are the first present peer in the order of leaders.

        Args:
            present: linked live trainers, and ourselves.
            reach: how many voters each of them is linked with. Behind NAT a peer may not reach all, and voters that the
                leader does not reach cannot contribute.
        """
        due = self._due.get(head.round + 1, set())
        due_voters = [voter for voter in head.voters if voter in present and voter[0] in due]
        if 2 * len(due_voters) < len(head.voters) or not is_quorum(present, head.voters):
            return False
        furthest = max(reach.values(), default=0)
        if self.counter % ANY_LEADER_EVERY != ANY_LEADER_EVERY - 1:
            present = [voter for voter in present if reach.get(voter[0], 0) == furthest]
        present_voters = [voter[0] for voter in head.voters if voter in present]
        others = [peer for peer, _ in present]
        return leader_order(head.lineage, head.round + 1, self.counter, present_voters, others)[0] == own

    def window_s(self, sync_every: int, step_s: float, speeds: Iterable[float]) -> float:
        """How long peers have to join: 1.5 × the longest recent delay, within bounds.

        Args:
            sync_every: H of the run.
            step_s: of our own step.
            speeds: of other peers, in steps per second; 0 if unknown.
        """
        interval_s = sync_every * step_s
        spread_s = WINDOW_MARGIN * max(self._spreads, default=interval_s)
        # Peers join after their next step: room for two steps of the slowest, at most four times ours.
        slowest_s = max((1 / speed for speed in speeds if speed > 0), default=0.0)
        room_s = 2.5 * min(max(slowest_s, step_s), 4 * step_s)
        return max(MIN_WINDOW_S, room_s, min(spread_s, MAX_WINDOW_OF_INTERVAL * interval_s))
