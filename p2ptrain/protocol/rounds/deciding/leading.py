"""Which peer leads the next attempt at a round. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.wire.messages import Entry, Head
from p2ptrain.protocol.wire.transport import PeerId

# Those of furthest reach lead. In every third attempt reach does not count: it is a claim.
ANY_REACH_EVERY = 3


def barred(head: Head, entries: Sequence[Entry]) -> frozenset[PeerId]:
    """The leaders of the last rounds, fewer than half of the voters: else one, or some in turn, could lead all.

    With two voters nobody is barred: the first is a quorum alone.

    Args:
        entries: the history that ends at the head.
    """
    commits = (entry.commit for entry in reversed(entries) if entry.commit is not None)
    return frozenset(commit.attempt.leader for commit in islice(commits, (len(head.voters) - 1) // 2))


def free_voters(head: Head, present: Collection[Voter], barred: Collection[PeerId]) -> list[Voter]:
    """The voters that are here and not barred."""
    return [voter for voter in head.voters if voter in present and voter[0] not in barred]


def reach_tolerance(head: Head) -> int:
    """By how many a reach may be less than another and count as much: it is a claim, and peers restart."""
    return max(0, len(head.voters) - 1) // 3


def is_half_due(head: Head, due: Collection[PeerId], present: Collection[Voter]) -> bool:
    """Whether half of the voters are here and due for the next round."""
    return 2 * sum(voter in present and voter[0] in due for voter in head.voters) >= len(head.voters)


def leader_of(
    head: Head,
    counter: int,
    due: Collection[PeerId],
    present: Collection[Voter],
    reach: Mapping[PeerId, int],
    barred: Collection[PeerId] = (),
) -> PeerId | None:
    """The peer that leads this attempt; None without a quorum of the voters, or before half of them are due.

    Of those that reach the most, voters that contributed to the last round come first, then other voters, then others;
    among equals a hash decides. If somebody is barred, another voter leads, also one that reaches a little less.

    Args:
        counter: of the attempt, as the peers expect it.
        due: the peers that are due for the round.
        present: the live peers of the lineage, and ourselves.
        reach: with how many voters, and contributors to the last round, each of them is linked. Behind NAT a peer may
            not reach all, and those that the leader does not reach cannot contribute.
    """
    if not is_half_due(head, due, present) or not is_quorum(present, head.voters):
        return None
    furthest = max(reach.get(peer, 0) for peer, _ in present)

    def reaching(least: int) -> list[Voter]:
        return [voter for voter in present if reach.get(voter[0], 0) >= least]

    is_any = counter % ANY_REACH_EVERY == ANY_REACH_EVERY - 1
    candidates = list(present) if is_any else reaching(furthest)
    if barred:
        nearly = reaching(furthest - reach_tolerance(head))
        candidates = free_voters(head, candidates, barred) or free_voters(head, nearly, barred) or candidates
    contributed = head.contributors

    def order(voter: Voter) -> tuple[bool, bool, bytes]:
        name = f"{head.lineage}/{head.round + 1}/{counter}/{voter[0]}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return voter not in head.voters, voter not in contributed, digest

    return min(candidates, key=order)[0]


def is_out_of_turn(leader: PeerId, head: Head, free: Collection[Voter], reach: Mapping[PeerId, int]) -> bool:
    """Whether somebody else should lead: one of the free voters, who reaches nearly as many."""
    ids = [peer for peer, _ in free]
    least = reach.get(leader, 0) - reach_tolerance(head)
    return leader not in ids and any(reach.get(peer, 0) >= least for peer in ids)
