"""Who decides the next round. Pure.

The founder of a lineage votes first. Whoever leads a round could name few contributors, or make some up. So it is the
voters that say who is there: each signs, when it joins an attempt, with which peers it is linked (its *view*). A
contributor begins to vote if a quorum of the voters sees it, and a voter ends if a quorum does not, unless its own view
came. So fewer liars than a quorum add and remove nobody, whoever leads.

Three voters stay until others take their places: of two, the first decides alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import MAX_VOTERS, VOTER_HASH_BYTES, Contributor, Head, Record, View
from p2ptrain.protocol.wire.transport import PeerId

Voter = tuple[PeerId, str]  # with its incarnation

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

    Those that stay come first, in their order. The others follow by a hash that nobody knows before the round's parent,
    so that no choice of a peer id makes its owner a voter of each round.

    Args:
        views: of voters of `head`. Those that are missing change nobody.
    """
    seen = {(view.peer_id, view.incarnation): _hashes_in(view.seen) for view in views}

    def agreed(says: Callable[[set[bytes]], bool]) -> bool:
        return is_quorum({voter for voter, hashes in seen.items() if says(hashes)}, head.voters)

    def is_seen(voter: Voter) -> bool:
        return agreed(lambda hashes: _hash_of(voter) in hashes)

    def is_missed(voter: Voter) -> bool:
        return voter not in seen and agreed(lambda hashes: _hash_of(voter) not in hashes)

    missed = [voter for voter in head.voters if is_missed(voter)]
    stay = {voter[0] for voter in head.voters if voter not in missed}
    new = sorted(
        filter(is_seen, ((c.peer_id, c.incarnation) for c in contributors if c.peer_id not in stay)),
        key=lambda voter: hashlib.blake2b(voter[0].encode(), key=head.state_hash.encode()[:64], digest_size=8).digest(),
    )
    # Another incarnation takes the place of the one before.
    missed = [voter for voter in missed if voter[0] not in dict(new)]
    spared = missed[: max(0, FEWEST_VOTERS - len(stay) - len(new))]
    return (*(voter for voter in head.voters if voter[0] in stay or voter in spared), *new)[:MAX_VOTERS]


def _hashes_in(seen: bytes) -> set[bytes]:
    return {seen[i : i + VOTER_HASH_BYTES] for i in range(0, len(seen), VOTER_HASH_BYTES)}


def check_voters(record: Record, head: Head) -> None:
    """Raises WireError unless the voters of a record that follows `head` are those that follow from its views."""
    viewers = [(view.peer_id, view.incarnation) for view in record.views]
    if len(set(viewers)) < len(viewers) or not set(viewers) <= set(head.voters):
        raise WireError("a record whose views are not each of another voter")
    if record.voters != next_voters(head, record.contributors, record.views):
        raise WireError("a record with other voters than follow from its views")
