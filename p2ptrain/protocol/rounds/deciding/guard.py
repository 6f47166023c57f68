"""The guards against outer gradients and means that are far too large. Pure, but for the history of `MeanGuard`.

The leader limits each outer gradient by the others' norms, as reducers report them (`guarded`). Each member then checks
the mean before it is READY (`MeanGuard`): one far larger than those of the rounds before is refused. That check relies
on no claim, as each peer computes the norm of the decoded mean. It catches what the leader's guard cannot see: reducers
that lie, and leaders that skip the guard.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.wire.messages import Head, Join, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# A contributor's norm is limited to this many times the median. With 4, a member whose own norm is 0.8 of the median
# got -5 times its outer gradient into 2 of 12 rounds, which cost 0.10 nats (benchmarks/harm.py); see also `guarded`.
MOST_NORMS = 3.0
# Tokens raise that limit by their square root, up to the tokens of two intervals: after a missed round a member has
# that many. If they raised it in proportion, every second gradient of -5 times its size got in (benchmarks/harm.py).
MOST_TOKENS_ALLOWED = 2.0
# A mean's norm is refused above this many times the median of the last ones (guess). Honest ones change by less: by the
# schedule of intervals (3), and with the number of contributors (its square root). With the steps of an interval they
# grow at most in proportion, and so does the limit.
MOST_MEANS = 8.0
# Rounds remembered, and needed before anything is refused (guess).
ROUNDS, LEAST_ROUNDS = 8, 3
# An interval counts as at least this share of the run's: else a leader that hurries some rounds, whose norms are larger
# for their steps, would raise the limit of those of usual length by more than four (guess).
LEAST_SHARE = 0.25
# Refusals that double the limit: by 64 at most (guess). A mean that grows by more in an interval has diverged.
MOST_DOUBLINGS = 6

# Blocks [start, stop) and the squared norm of the mean there.
SpanNorms = Sequence[tuple[tuple[int, int], float]]


@dataclass(frozen=True, slots=True)
class Guarded:
    """The guard's decision on one member: its norm, its limit, and the factor on its share; 0 leaves it out."""

    norm: float
    limit: float
    scale: float


def scaled_down(weights: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Weights with which a member's share of the mean is `scale` times what it was; those with scale 1 get the rest.

    A mean divides by the sum of its weights. So a weight that is only multiplied leaves a member more: of two, a liar
    far above the limit would then count as much as with a norm of twice the limit.
    """
    members = list(zip(weights, scales, strict=True))
    scaled = math.fsum(weight * scale for weight, scale in members if scale < 1)
    whole = math.fsum(weight for weight, scale in members if scale == 1)
    rest = math.fsum(weights) - scaled
    if whole == 0:  # they claim no tokens: the rest in equal parts
        return [rest / scales.count(1) if scale == 1 else weight * scale for weight, scale in members]
    factor = whole / rest
    return [weight if scale == 1 else weight * scale * factor for weight, scale in members]


def guarded(
    run: RunConfig, joins: Mapping[PeerId, Join], norms: Mapping[PeerId, float], leader: PeerId | None
) -> dict[PeerId, Guarded]:
    """What the guard does with each contributor, in the order of `norms`.

    A member's limit is `MOST_NORMS` times the median norm; with two members, of the leader's, and none if the leader is
    new. Members without any change, such as peers that have just joined, are left out of the median.

    Two members have no majority. So the one that does not lead is scaled down, never left out: if the anchor is near
    the optimum of the leader's data, the leader's norm is small, and a peer with unlike data would be left out of every
    round (measured).
    The disjoint mean does not scale, and leaves it out.

    Norms of honest members differ. They grow with the steps of an interval, about with their square root and at most in
    proportion, and intervals give fast members more steps. So a member with more tokens than the median has a limit
    higher by their square root, up to `MOST_TOKENS_ALLOWED` times the tokens: they are a claim. A newcomer's optimizer
    is cold, and its first gradients are up to two or three times as large. Codecs change a norm by little, and
    pruning, top-k and int2, which remove values, only make it smaller. Where moments are averaged too, they do not
    count.

    If at most half of the members lie, the others stay: the median is within the norms of honest ones, or above them if
    exactly half lie. A reducer that reports false norms can have fewer than half of the members left out, and can hide
    a large norm in its own part.

    Args:
        joins: those of all members.
        norms: of the contributors. Not squared.
        leader: None if it did not contribute to the last round: it has adopted the other's state, and a few steps
            of its own say little.
    """
    positive = {member: norm for member, norm in norms.items() if norm > 0}
    if run.round_guard == "off" or len(norms) < 2 or not positive:
        return {member: Guarded(norm, math.inf, 1.0) for member, norm in norms.items()}
    basis = list(positive)
    if len(norms) == 2:
        if leader not in positive:
            return {member: Guarded(norm, math.inf, 1.0) for member, norm in norms.items()}
        basis = [leader]
    median = statistics.median(positive[member] for member in basis)
    tokens = max(1.0, statistics.median(joins[member].tokens for member in basis))
    limits = {
        member: MOST_NORMS * median * math.sqrt(min(max(1.0, joins[member].tokens / tokens), MOST_TOKENS_ALLOWED))
        for member in norms
    }

    clips = run.round_guard == "clip" or (len(norms) == 2 and run.round_mean != "disjoint")

    def scale(member: PeerId) -> float:
        if norms[member] <= limits[member]:
            return 1.0
        return limits[member] / norms[member] if clips else 0.0

    return {member: Guarded(norm, limits[member], scale(member)) for member, norm in norms.items()}


def norms_of(
    plan: Sequence[RosterPart],
    parts: Collection[int],
    squares: Mapping[int, Mapping[PeerId, float]],
    contributors: Sequence[PeerId],
) -> dict[PeerId, float]:
    """The norm of each contributor, from the squared norms that the reducers of these parts report.

    Where several reducers report the same blocks, the median of their reports counts.
    """
    ranges = sorted({(plan[part].start, plan[part].stop) for part in parts})
    of_range = {bounds: [part for part in parts if (plan[part].start, plan[part].stop) == bounds] for bounds in ranges}

    def square(member: PeerId) -> float:
        reports = ([squares[p][member] for p in of if member in squares[p]] for of in of_range.values())
        return math.fsum(statistics.median(reported) for reported in reports if reported)

    return {member: math.sqrt(square(member)) for member in contributors}


class MeanGuard:
    """This peer's own history of means. It outlives attempts and heads.

    If the means of a swarm really have grown, rounds must go on. So a refusal doubles the limit until the next round
    lands. That counts only if a voter leads, once for each voter, round and snapshot, and `MOST_DOUBLINGS` times in
    all. A liar with many ids cannot raise the limit. A voter that leads can, once an interval, by calling again: a new
    snapshot is taken only after a round was skipped.

    Peers that train on without rounds have larger and larger outer gradients. So the limit grows with this peer's own
    steps, if they are more than in the last intervals. Its position in the run would not do: the leader says how many
    steps an interval has.

    Where each round averages one section of the vector, each has a history. The last round averages all of them: its
    squared norm is compared with the sum of theirs.
    """

    def __init__(self, sync_every: int, steps: int = 0) -> None:
        # sync_every: the run's steps between two rounds of the same blocks; steps: ours now.
        self._sync_every = sync_every
        # By the blocks that rounds averaged: norms, each with our steps since the round before it.
        self._past: dict[tuple[int, int], deque[tuple[float, float]]] = {}
        # By the blocks: our step at the last round. Before there was one we began to count at `_began_at`.
        self._noted_at: dict[tuple[int, int], int] = {}
        self._began_at = steps
        self._refused: set[tuple[Voter, str, int, int]] = set()

    def limit(self, first: int, end: int, steps: int) -> float:
        """The largest norm of blocks [first, end) that is not refused, at our step `steps`."""
        known = {
            blocks: statistics.median(norm * max(1.0, self._since(blocks, steps) / took) for norm, took in past)
            for blocks, past in self._past.items()
            if len(past) >= LEAST_ROUNDS
        }
        within = {(start, stop): norm for (start, stop), norm in known.items() if first <= start and stop <= end}
        own = within.pop((first, end), None)
        if own is None and sum(stop - start for start, stop in within) < end - first:
            return math.inf
        usual = math.hypot(*within.values()) if own is None else own
        # After rounds without any change there is no limit.
        return MOST_MEANS * usual * 2.0 ** len(self._refused) or math.inf

    def note(self, norms: SpanNorms, steps: int, *, has_snapshot: bool = True) -> None:
        """A round with this mean has landed.

        Args:
            steps: ours at our snapshot; without one, now. They then do not tell how long the interval was, which
                counts as usual.
        """
        blocks = blocks_of(norms)
        past = self._past.setdefault(blocks, deque(maxlen=ROUNDS))
        usual = statistics.median(took for _, took in past) if past else self._sync_every
        least = LEAST_SHARE * self._sync_every
        took = max(least, self._since(blocks, steps)) if has_snapshot else usual
        past.append((norm_of(norms), took))
        self._noted_at[blocks] = steps
        self._refused.clear()

    def count_from(self, steps: int) -> None:
        """Our weights were replaced by those of others at our step `steps`."""
        self._noted_at.clear()
        self._began_at = steps

    def _since(self, blocks: tuple[int, int], steps: int) -> int:
        """Our steps since the last round of these blocks, at our step `steps`."""
        return steps - self._noted_at.get(blocks, self._began_at)

    def refusal(self, norms: SpanNorms, head: Head, leader: Voter, steps: int, *, has_snapshot: bool = True) -> str:
        """Why this mean is refused; empty if it is not.

        Args:
            head: ours. The mean is of the round after it.
            leader: who proposes it.
            steps, has_snapshot: as for `note`.
        """
        norm, limit = norm_of(norms), self.limit(*blocks_of(norms), steps)
        if norm <= limit:
            return ""
        if leader in head.voters and len(self._refused) < MOST_DOUBLINGS:
            self._refused.add((leader, head.lineage, head.round, steps if has_snapshot else 0))
        return f"the norm of the mean, {norm:.3g}, is above the limit of the last rounds, {limit:.3g}"


def blocks_of(norms: SpanNorms) -> tuple[int, int]:
    """The blocks [first, end) that the spans cover."""
    return norms[0][0][0], norms[-1][0][1]


def norm_of(norms: SpanNorms) -> float:
    return math.sqrt(math.fsum(square for _, square in norms))
