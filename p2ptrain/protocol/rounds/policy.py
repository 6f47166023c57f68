"""A leader's decisions from the members' claims: contributors, weights, reducers, and who is at fault. Pure.

Claims of one peer are limited by those of the others, so that a single wrong number has little effect.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.algorithms.averaging import token_weights
from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.draw import drawn
from p2ptrain.protocol.wire.messages import Contributor, Join, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# A claimed rate is limited to this many times the median.
MOST_RATES = 4.0
# A contributor's norm is limited to this many times the median. With 4, a member whose own norm is 0.8 of the median
# got -5 times its outer gradient into 2 of 12 rounds, which cost 0.10 nats (benchmarks/harm.py); see also `guarded`.
MOST_NORMS = 3.0
# Tokens raise that limit by their square root, up to the tokens of two intervals: after a missed round a member has
# that many. If they raised it in proportion, every second gradient of -5 times its size got in (benchmarks/harm.py).
MOST_TOKENS_ALLOWED = 2.0


@dataclass(frozen=True, slots=True)
class Guarded:
    """The guard's decision on one member: its norm, its limit, and the factor on its share; 0 leaves it out."""

    norm: float
    limit: float
    scale: float


def agreed_state(joins: Mapping[PeerId, Join], own: str) -> str:
    """The state of most joined peers; on a tie, our own. `joins` is not empty."""
    states = [join.state_hash for join in joins.values()]
    return max(set(states), key=lambda state: (states.count(state), state == own))


def members_of(joins: Mapping[PeerId, Join], state_hash: str, most: int) -> list[PeerId]:
    """Members with a snapshot on the agreed state, sorted; those drawn for this round if there are more than `most`."""
    able = [p for p, join in joins.items() if join.has_snapshot and join.state_hash == state_hash]
    return drawn(state_hash, able, most)


def _can_reduce(peer: PeerId, joins: Mapping[PeerId, Join]) -> bool:
    """Whether all other members say that they are linked with this one."""
    return all(peer in join.linked for other, join in joins.items() if other != peer)


def averageable(joins: Mapping[PeerId, Join], avoided: Collection[PeerId]) -> dict[PeerId, Join]:
    """The members without those that keep all others but the avoided ones from reducing, by naming too few links.

    All members if at most half would be left. `avoided`: as for `reducers_of`.
    """
    left = dict(joins)
    while left and not any(_can_reduce(peer, left) for peer in left.keys() - set(avoided)):
        del left[min(left, key=lambda peer: (len(left.keys() & set(left[peer].linked)), peer))]
    return left if 2 * len(left) > len(joins) else dict(joins)


def reducers_of(joins: Mapping[PeerId, Join], avoided: Collection[PeerId]) -> list[PeerId]:
    """Members that are linked to all other members, the best-connected first. Raises RoundFailedError if none is.

    Args:
        avoided: members that were silent as reducers or broke the protocol; used only if no other can reduce.
    """
    linked = [peer for peer in joins if _can_reduce(peer, joins)]
    if not linked:
        raise RoundFailedError("no member is linked to all others, so none can average")
    able = [peer_id for peer_id in linked if peer_id not in avoided] or linked
    most = MOST_RATES * statistics.median_low([joins[peer_id].rate for peer_id in able])
    return sorted(able, key=lambda peer_id: (-min(joins[peer_id].rate, most), peer_id))


def parts_of(members: Sequence[PeerId], plan: Sequence[RosterPart]) -> dict[PeerId, set[int]]:
    """The numbers of the parts that each member sends, by member in the order of `members`."""
    senders = [part.senders or members for part in plan]
    return {member: {i for i, of_part in enumerate(senders) if member in of_part} for member in members}


def is_doubted(
    part: int,
    failed: Collection[PeerId],
    sends: Mapping[PeerId, Collection[int]],
    complete: Mapping[PeerId, Collection[int]],
    parts: Collection[int],
) -> bool:
    """Whether a part's reducer is at fault, and not those whom it gives up.

    It is at fault if at least half of its other senders, and at least one, are given up by it alone: they are complete
    at all other reducers. The only reducer is at fault if it gives up more than half.

    Args:
        failed: the members that it gives up.
        sends, complete: by member, the parts that it sends, and those that have arrived.
        parts: those whose reducers are not gone.
    """
    elsewhere = set(parts) - {part}
    alone = [member for member in failed if elsewhere.intersection(sends[member]) <= set(complete[member])]
    others = sum(part in sent for sent in sends.values()) - 1
    return 2 * len(alone) >= max(2, others) and (bool(elsewhere) or 2 * len(alone) > others)


def weights_of(run: RunConfig, joins: Sequence[Join]) -> list[float]:
    """Weights of outer gradients, in the order of `joins`: none more than twice the median's tokens."""
    match run.round_weights:
        case "equal":
            return [1.0] * len(joins)
        case "shard":
            return token_weights([join.shard_tokens for join in joins])
    return token_weights([join.tokens for join in joins])


def scaled_down(weights: Sequence[float], scales: Sequence[float]) -> list[float]:
    """The weights that leave each member its share of the mean times its scale, and the rest to those with scale 1.

    A mean divides by the sum of its weights. So a weight that is only multiplied leaves a member more: of two, a liar
    far above the limit would then count as much as with a norm of twice the limit.
    """
    scaled = math.fsum(weight * scale for weight, scale in zip(weights, scales, strict=True) if scale < 1)
    whole = math.fsum(weight for weight, scale in zip(weights, scales, strict=True) if scale == 1)
    factor = whole / (math.fsum(weights) - scaled)
    return [weight if scale == 1 else weight * scale * factor for weight, scale in zip(weights, scales, strict=True)]


def guarded(
    run: RunConfig, joins: Mapping[PeerId, Join], norms: Mapping[PeerId, float], leader: PeerId | None
) -> dict[PeerId, Guarded]:
    """What the guard does with each contributor, in the order of `norms`.

    A member's limit is `MOST_NORMS` times the median norm; with two members, of the leader's, and none if the leader is
    new. Members without any change, such as peers that have just joined, are left out of the median.

    Two members have no majority, and the other is scaled down, not left out: if the anchor is near the optimum of the
    leader's data, its norm is small, and a peer with unlike data would be left out of every round (measured).
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
    plan: Sequence[RosterPart], parts: Collection[int], squares: Mapping[int, Mapping[PeerId, float]],
    contributors: Sequence[PeerId],
) -> dict[PeerId, float]:  # fmt: skip
    """The norm of each contributor, from the squared norms that the reducers of these parts report.

    Where several reducers report the same blocks, the median of their reports counts.
    """
    ranges = sorted({(plan[part].start, plan[part].stop) for part in parts})
    of_range = {bounds: [part for part in parts if (plan[part].start, plan[part].stop) == bounds] for bounds in ranges}

    def square(member: PeerId) -> float:
        reports = ([squares[p][member] for p in of if member in squares[p]] for of in of_range.values())
        return math.fsum(statistics.median(reported) for reported in reports if reported)

    return {member: math.sqrt(square(member)) for member in contributors}


def included(
    sends: Mapping[PeerId, Collection[int]], complete: Mapping[PeerId, Collection[int]], parts: Collection[int],
    gone: Collection[PeerId],
) -> list[PeerId]:  # fmt: skip
    """The contributors: members that are complete at all of these parts that they send, and not gone."""
    wanted = {member: set(parts).intersection(sent) for member, sent in sends.items() if member not in gone}
    return [member for member, of_member in wanted.items() if of_member and of_member <= set(complete[member])]


def conflicts_of(
    roots: Mapping[int, Mapping[PeerId, bytes]], plan: Sequence[RosterPart], own: PeerId
) -> dict[int, set[PeerId]]:
    """By part, the members whose Merkle root, as its reducer reports it, differs from the agreed one.

    The agreed root is that of our own part or, if we reduce none, of most parts.

    Args:
        roots: by part, then by member.
        own: our peer id.
    """
    given: dict[PeerId, dict[int, bytes]] = defaultdict(dict)
    for part, of_part in roots.items():
        for member, root in of_part.items():
            given[member][part] = root
    conflicts: dict[int, set[PeerId]] = defaultdict(set)
    for member, of_member in given.items():
        ours = (root for part, root in of_member.items() if plan[part].reducer == own)
        agreed = next(ours, Counter(of_member.values()).most_common(1)[0][0])
        for part, root in of_member.items():
            if root != agreed:
                conflicts[part].add(member)
    return conflicts


def without_roots(contributors: Sequence[Contributor]) -> tuple[Contributor, ...]:
    """As a roster names them, before their Merkle roots are known."""
    return tuple(Contributor(c.peer_id, c.incarnation, c.weight, b"") for c in contributors)
