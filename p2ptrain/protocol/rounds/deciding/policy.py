"""Who contributes to a round, who reduces, with which weights, and who is at fault. Pure.

**The draw.** A round has at most `max_contributors`. A hash of the state that the round starts from, and of the id,
gives each peer a rank. The leader calls the peers of lowest rank that it is linked with. No peer knows all others of a
large swarm, so each decides by its own rank and an estimate of the swarm's size whether it may be among those. If so,
it links to the voters, one of which leads. The draw depends on the round before, so nobody can choose an id that is
always drawn. Partial participation by a random draw is that of federated averaging (McMahan et
al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017).

**The leader's decisions** follow from the members' claims. Claims of one peer are limited by those of the others, so
that a single wrong number has little effect. `guard` limits the outer gradients themselves.

**Recent contributors** are those whose fragments are merged. A fragment changes weights at once, and nobody votes on
it. So a peer must first bring an outer gradient that a quorum of voters has committed. Until then it merges the
fragments of others, and its inner optimizer warms up meanwhile. Only these peers need to be named by a record:
strangers that never contribute could else have every round refused.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from p2ptrain.algorithms.averaging import token_weights
from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.wire.messages import Contributor, Head, Join, Reduced, RosterPart
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# More link to the voters than contribute: the estimate of the size may be 10 % off, and some are lost (guess).
MARGIN = 1.25
# A link is kept if one of its ends may think so that both take part: estimates differ by that much (guess).
MARGIN_OF_OTHERS = 1.5
# A claimed rate is limited to this many times the median.
MOST_RATES = 4.0
# A slow peer, or one whose link fails now and then, misses a few rounds. Of more than 64 members, 64 contribute to each
# round: with 200 members, a given one is in at least one of eight with a probability of 95 %.
RECENT_ROUNDS = 8
_RANKS = 2**64

# Numbers of parts, by member.
PartsOf = Mapping[PeerId, Collection[int]]
# Members that its reducer gives up, by part.
FailedAt = Mapping[int, Collection[PeerId]]


def rank(state_hash: str, peer_id: PeerId) -> int:
    """The rank of a peer in the draw of the round that starts from this state, from 0 to 2^64 - 1: uniform."""
    return int.from_bytes(hashlib.blake2b(f"{state_hash}/{peer_id}".encode(), digest_size=8).digest())


def drawn(state_hash: str, peer_ids: Iterable[PeerId], most: int) -> list[PeerId]:
    """The `most` peers of lowest rank, in the order of their ids."""
    return sorted(sorted(peer_ids, key=lambda peer_id: rank(state_hash, peer_id))[:most])


def may_be_drawn(own_rank: int, most: int, swarm_size: float, margin: float = MARGIN) -> bool:
    """Whether a peer of this rank is likely among the `most` of lowest rank in a swarm of about this size."""
    return own_rank * swarm_size < _RANKS * most * margin


def members_of(joins: Mapping[PeerId, Join], state_hash: str, most: int) -> list[PeerId]:
    """Members with a snapshot on this state, sorted; those drawn for this round if there are more than `most`."""
    able = [p for p, join in joins.items() if join.has_snapshot and join.state_hash == state_hash]
    return drawn(state_hash, able, most)


def _can_reduce(peer: PeerId, joins: Mapping[PeerId, Join]) -> bool:
    """Whether all other members say that they are linked with this one."""
    return all(peer in join.linked for other, join in joins.items() if other != peer)


def averageable(
    joins: Mapping[PeerId, Join], avoided: Collection[PeerId], voters: Collection[Voter]
) -> dict[PeerId, Join]:
    """Drop the least linked members until some member that is not avoided is linked to all that remain.

    A link counts only if both sides name it, as strangers may join, and name whom they like. Those with voters count
    first.

    All members if at most half would be left: a member may name too few links. But strangers that join may be most
    members, so most of the voters are enough if one of them can reduce, or if otherwise none could. `avoided`: as for
    `reducers_of`.
    """
    left = dict(joins)
    joined = {peer for peer, join in joins.items() if (peer, join.incarnation) in voters}
    named = {peer: {peer, *join.linked} for peer, join in joins.items()}
    links = {peer: {other for other in joins.keys() & named[peer] if peer in named[other]} for peer in joins}
    while left and not any(_can_reduce(peer, left) for peer in left.keys() - set(avoided)):
        voted = joined & left.keys()
        del left[min(left, key=lambda peer: (len(links[peer] & voted), len(links[peer] & left.keys()), peer))]
    if 2 * len(left) > len(joins):
        return left
    stay = joined & left.keys()
    reduces = any(_can_reduce(voter, left) for voter in stay - set(avoided))
    reduces = reduces or not any(_can_reduce(voter, joins) for voter in joined)
    return left if reduces and 2 * len(stay) > len(joined) else dict(joins)


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


def at_fault(
    failed: FailedAt, sends: PartsOf, complete: PartsOf, parts: Collection[int], *, must_blame: bool = False
) -> set[int]:
    """The parts whose reducers are at fault, rather than the members that they give up.

    A reducer is at fault if it gives up at least half of its other senders (at least one) although they are complete at
    most other reducers. An only reducer is at fault if it gives up more than half. If this would blame most reducers,
    only those that give up the most are at fault: liars may also give up honest members, and withhold from honest
    reducers.

    Args:
        failed: by part, the members that its reducer gives up; parts that are not to be blamed are left out.
        sends, complete: by member, the parts that it sends, and those that have arrived.
        parts: those whose reducers are not gone.
        must_blame: if no reducer is at fault by this rule, blame those that give up the most.
    """
    given_up = {
        part: sum(_is_complete_elsewhere(parts, part, sends, complete, member) for member in failed[part])
        for part in parts
        if part in failed
    }

    def is_at_fault(part: int) -> bool:
        others = sum(part in sent for sent in sends.values()) - 1
        return 2 * given_up[part] >= max(2, others) and (len(parts) > 1 or 2 * given_up[part] > others)

    faulty = set(filter(is_at_fault, given_up))
    if 2 * len(faulty) > max(2, len(parts)) or (must_blame and not faulty):
        most = max(given_up.values(), default=0)
        return {part for part, count in given_up.items() if count == most > 0}
    return faulty


def _is_complete_elsewhere(parts: Collection[int], but: int, sends: PartsOf, complete: PartsOf, member: PeerId) -> bool:
    """Whether most parts that a member sends, other than `but`, have arrived."""
    elsewhere = set(parts).intersection(sends[member]) - {but}
    missing = elsewhere.difference(complete[member])
    return not missing or 2 * len(missing) < len(elsewhere)


def is_anyone_awaited(
    failed: FailedAt, sends: PartsOf, complete: PartsOf, parts: Collection[int], gone: Collection[PeerId]
) -> bool:
    """Whether a member can still become complete, or the fault of its reducer. For the arguments see `at_fault`."""
    hoped = {member: {part for part in parts if member not in failed[part]} for member in sends}
    faulty = at_fault(failed, sends, hoped, parts)
    excluded = {member for part in set(parts) - faulty for member in failed[part]}.union(gone)
    return any(hoped[m].intersection(sends[m]).difference(complete[m]) for m in sends.keys() - excluded)


def weights_of(run: RunConfig, joins: Sequence[Join]) -> list[float]:
    """Weights of outer gradients, in the order of `joins`: none more than twice the median's tokens.

    If fewer than half of the members that train report tokens, all that train weigh the same: members refuse the mean
    of a minority.
    """
    if run.round_weights == "equal":
        return [1.0] * len(joins)
    tokens = [join.shard_tokens if run.round_weights == "shard" else join.tokens for join in joins]
    # Who has just joined has trained on nothing, and does not know its speed.
    train = [count > 0 or join.speed > 0 for count, join in zip(tokens, joins, strict=True)]
    if 2 * sum(count > 0 for count in tokens) < sum(train):
        return [float(trains) for trains in train]
    return token_weights(tokens)


def included(sends: PartsOf, complete: PartsOf, parts: Collection[int], gone: Collection[PeerId]) -> list[PeerId]:
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


def counted_reports(
    reports: Mapping[int, Reduced], plan: Sequence[RosterPart], gone: Collection[PeerId], own: PeerId
) -> dict[int, Reduced]:
    """The reports that a leader uses, by part.

    Reducers that average the same blocks of the same senders must report the same hashes. If we are one of them, only
    our report is used; else those with the hashes that more than half of all report that are not gone, or that most
    report once all have.

    Args:
        gone: reducers that are not awaited.
        own: our peer id.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(plan):
        if number in reports or part.reducer not in gone:
            groups[part.start, part.stop, part.senders].append(number)
    counted: dict[int, Reduced] = {}
    for numbers in groups.values():
        wanted = [number for number in numbers if plan[number].reducer == own] or numbers
        here = [number for number in wanted if number in reports]
        agreed, count = next(iter(Counter(reports[number].digests for number in here).most_common(1)), ((), 0))
        if here and (2 * count > len(wanted) or len(here) == len(wanted)):
            counted |= {number: reports[number] for number in here if reports[number].digests == agreed}
    return counted


def without_roots(contributors: Sequence[Contributor]) -> tuple[Contributor, ...]:
    """As a roster names them, before their Merkle roots are known."""
    return tuple(Contributor(c.peer_id, c.incarnation, c.weight, b"") for c in contributors)


@dataclass(frozen=True)
class RecentContributors:
    """The contributors of the last `RECENT_ROUNDS` rounds that this peer knows.

    A joiner knows only the record of its head. Before the first round, and in runs without rounds, everybody counts.

    Attributes:
        lineage: of our head.
        rounds: the number and the contributors of each round, oldest first.
    """

    lineage: str = ""
    rounds: tuple[tuple[int, frozenset[PeerId]], ...] = ()

    def after(self, head: Head) -> RecentContributors:
        """The contributors after a new head, which follows from a round or from an adopted state."""
        record = head.record
        if record is None:
            return RecentContributors(head.lineage)
        # A new lineage begins with the last record of the one before.
        known = self.rounds if self.lineage in (head.lineage, record.lineage) else ()
        kept = [of for of in known if record.round - RECENT_ROUNDS < of[0] < record.round]
        newest = frozenset(contributor.peer_id for contributor in record.contributors)
        return RecentContributors(head.lineage, (*kept, (record.round, newest)))

    @cached_property
    def peer_ids(self) -> frozenset[PeerId]:
        return frozenset().union(*(contributors for _, contributors in self.rounds))

    def admits(self, peer_id: PeerId) -> bool:
        """Whether fragments of this peer are merged; if not, it need not push any."""
        return not self.rounds or any(peer_id in contributors for _, contributors in self.rounds)
