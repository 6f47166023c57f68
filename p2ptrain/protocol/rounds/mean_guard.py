"""The last check before READY: a mean far larger than those of the rounds before is refused. Pure, but for its history.

It relies on no claim: each peer computes the norm of the decoded mean. It catches what the guard of outer gradients
cannot see: reducers that lie, and leaders that skip that guard.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from p2ptrain.protocol.rounds.proof import Voter
from p2ptrain.protocol.wire.messages import Head

# Blocks [start, stop) and the squared norm of the mean there.
SpanNorms = Sequence[tuple[tuple[int, int], float]]
# A mean's norm is refused above this many times the median of the last ones (guess). Honest ones change by less: by the
# schedule of intervals (3), and with the number of contributors (its square root).
MOST_MEANS = 8.0
# Rounds remembered, and needed before anything is refused (guess).
ROUNDS, LEAST_ROUNDS = 8, 3
# Refusals that double the limit: by 64 at most (guess). A mean that grows by more in an interval has diverged.
MOST_DOUBLINGS = 6


class MeanGuard:
    """This peer's own history of means. It outlives attempts and heads.

    If the means of a swarm really have grown, rounds must go on. So a refusal doubles the limit until the next round
    lands. That counts only if a voter leads, once for each voter, round and snapshot, and `MOST_DOUBLINGS` times in
    all. A liar cannot raise the limit under other identities. It can once an interval, by calling again: a new snapshot
    is taken only after a round was skipped.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=ROUNDS)
        self._refused: set[tuple[Voter, str, int, int]] = set()

    @property
    def limit(self) -> float:
        """The largest norm that is not refused."""
        if len(self._norms) < LEAST_ROUNDS:
            return math.inf
        # After rounds without any change there is no limit.
        return MOST_MEANS * statistics.median(self._norms) * 2.0 ** len(self._refused) or math.inf

    def note(self, norms: SpanNorms) -> None:
        """A round with this mean has landed."""
        self._norms.append(norm_of(norms))
        self._refused.clear()

    def refusal(self, norms: SpanNorms, head: Head, leader: Voter, snapshot: int) -> str:
        """Why this mean is refused; empty if it is not.

        Args:
            head: ours. The mean is of the round after it.
            leader: who proposes it.
            snapshot: the steps at which our snapshot was taken.
        """
        norm, limit = norm_of(norms), self.limit
        if norm <= limit:
            return ""
        if leader in head.voters and len(self._refused) < MOST_DOUBLINGS:
            self._refused.add((leader, head.lineage, head.round, snapshot))
        return f"the norm of the mean, {norm:.3g}, is above the limit of the last rounds, {limit:.3g}"


def norm_of(norms: SpanNorms) -> float:
    return math.sqrt(math.fsum(square for _, square in norms))
