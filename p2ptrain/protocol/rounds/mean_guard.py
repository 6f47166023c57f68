"""The last check before READY: a mean far larger than those of the rounds before is refused. Pure, but for its history.

It needs no claim of anybody: the norm is that of the decoded mean. It catches what the guard of outer gradients cannot
see: reducers that lie, and leaders that leave the guard out.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence

from p2ptrain.protocol.wire.transport import PeerId

# Blocks [start, stop) and the squared norm of the mean there.
SpanNorms = Sequence[tuple[tuple[int, int], float]]
# A mean's norm is refused above this many times the median of the last ones (guess). Honest ones change by less: by the
# schedule of intervals (3), and with the number of contributors (its square root).
MOST_MEANS = 8.0
# Rounds remembered, and needed before anything is refused (guess).
ROUNDS, LEAST_ROUNDS = 8, 3


class MeanGuard:
    """This peer's own history of means. It outlives attempts and heads.

    A swarm whose means really have grown must not be blocked for ever. So each refusal doubles the limit until the next
    round has landed: once for each leader and snapshot, so that one leader that calls again and again raises it once.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=ROUNDS)
        self._refused: set[Hashable] = set()

    @property
    def limit(self) -> float:
        """The largest norm that is not refused."""
        if len(self._norms) < LEAST_ROUNDS:
            return math.inf
        # After rounds without any change, nothing can be said.
        return MOST_MEANS * statistics.median(self._norms) * 2.0 ** min(len(self._refused), 500) or math.inf

    def note(self, norms: SpanNorms) -> None:
        """A round with this mean has landed."""
        self._norms.append(norm_of(norms))
        self._refused.clear()

    def refusal(self, norms: SpanNorms, leader: PeerId, snapshot: int) -> str:
        """Why this mean is refused; empty if it is not.

        Args:
            leader: who proposes it.
            snapshot: the steps at which our snapshot was taken.
        """
        norm, limit = norm_of(norms), self.limit
        if norm <= limit:
            return ""
        self._refused.add((leader, snapshot))
        return f"the norm of the mean, {norm:.3g}, is above the limit of the last rounds, {limit:.3g}"


def norm_of(norms: SpanNorms) -> float:
    return math.sqrt(math.fsum(square for _, square in norms))
