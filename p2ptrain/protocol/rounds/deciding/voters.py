"""Who votes on the next round. Pure.

A leader could name few contributors, or make some up, so it does not choose the voters. Each voter signs, as it joins
an attempt, with which peers it is linked: its *view*. A contributor becomes a voter if the views of a quorum have it. A
voter stops being one if the views of a quorum lack it and its own is missing. So liars that are no quorum neither add a
peer that the others do not see, nor remove one that they do, whoever leads.

The founder of a lineage is its first voter. Three voters stay until others take their places: of two, the first decides
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import MAX_VOTERS, VOTER_HASH_BYTES, Contributor, Head, Proposal, View
from p2ptrain.protocol.wire.transport import PeerId

Voter = tuple[PeerId, str]  # with its incarnation

# Of two voters, the first is a quorum by itself.
FEWEST_VOTERS = 3


def is_quorum(present: Collection[Voter], voters: Sequence[Voter]) -> bool:
    """Whether `present` has more than half of the voters, or half with the first. Any two quorums share a voter."""
    count = sum(voter in present for voter in voters)
    return 2 * count > len(voters) or (2 * count == len(voters) > 0 and voters[0] in present)


def seen_of(peers: Iterable[Voter]) -> bytes:
    """What a view says: the hashes of these peers, sorted."""
    return b"".join(sorted(map(_hash_of, peers)))


def _hash_of(voter: Voter) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(voter), digest_size=VOTER_HASH_BYTES).digest()


def next_voters(head: Head, contributors: Iterable[Contributor], views: Iterable[View]) -> tuple[Voter, ...]:
    """The voters of the round after the one that follows `head`, at most `MAX_VOTERS`.

    Those that stay come first, in their order. The others follow by a hash keyed with the state, which nobody knows
    before the last round: so no choice of a peer id makes its owner a voter of each round.

    Args:
        contributors: of the round that follows `head`.
        views: of voters of `head`. Those that are missing change nobody.
    """
    seen = {(view.peer_id, view.incarnation): _hashes_in(view.seen) for view in views}

    def seen_by(voter: Voter) -> set[Voter]:
        digest = _hash_of(voter)
        return {viewer for viewer, hashes in seen.items() if digest in hashes}

    missed = [v for v in head.voters if v not in seen and is_quorum(seen.keys() - seen_by(v), head.voters)]
    stay = {peer_id for peer_id, _ in set(head.voters).difference(missed)}
    named = ((c.peer_id, c.incarnation) for c in contributors if c.peer_id not in stay)
    key = head.state_hash.encode()[:64]
    new = sorted(
        (voter for voter in named if is_quorum(seen_by(voter), head.voters)),
        key=lambda voter: hashlib.blake2b(voter[0].encode(), key=key, digest_size=8).digest(),
    )
    # Another incarnation takes the place of the one before.
    missed = [voter for voter in missed if voter[0] not in dict(new)]
    spared = missed[: max(0, FEWEST_VOTERS - len(stay) - len(new))]
    return (*(voter for voter in head.voters if voter[0] in stay or voter in spared), *new)[:MAX_VOTERS]


def _hashes_in(seen: bytes) -> set[bytes]:
    return {seen[i : i + VOTER_HASH_BYTES] for i in range(0, len(seen), VOTER_HASH_BYTES)}


def check_voters(proposal: Proposal, head: Head) -> None:
    """Raises WireError unless the record after `head` has the voters that the views show."""
    record, views = proposal.record, proposal.views
    viewers = [(view.peer_id, view.incarnation) for view in views]
    if len(set(viewers)) < len(viewers) or not set(viewers) <= set(head.voters):
        raise WireError("a proposal whose views are not each of another voter")
    if record.voters != next_voters(head, record.contributors, views):
        raise WireError("a record with other voters than the views show")
