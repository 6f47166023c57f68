"""Voters, quorums, and the record that a quorum of promises binds a leader to.

The contributors of a round are the voters of the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from p2ptrain.protocol.wire.messages import MAX_VOTERS, Join, Record
from p2ptrain.protocol.wire.transport import PeerId

Voter = tuple[PeerId, str]


def voters_of(record: Record) -> tuple[Voter, ...]:
    """The voters of the next round: the contributors in the record's order. A peer that is listed twice votes once.

    Of more than `MAX_VOTERS` a hash chooses that nobody knows before the round's parent, so that no choice of a peer id
    makes its owner a voter of each round.
    """
    first = {c.peer_id: c.incarnation for c in reversed(record.contributors)}
    listed = list(dict.fromkeys(c.peer_id for c in record.contributors))
    if len(listed) > MAX_VOTERS:
        key = record.parent_hash.encode()[:64]
        listed.sort(key=lambda peer: hashlib.blake2b(peer.encode(), key=key, digest_size=8).digest())
    return tuple((peer, first[peer]) for peer in listed[:MAX_VOTERS])


def is_quorum(present: Collection[Voter], voters: Sequence[Voter]) -> bool:
    """Whether `present` has more than half of the voters, or half with the first. Any two quorums share a voter."""
    count = sum(voter in present for voter in voters)
    return 2 * count > len(voters) or (2 * count == len(voters) > 0 and voters[0] in present)


def unfinished(joins: Iterable[tuple[PeerId, Join]], voters: Collection[Voter]) -> Record | None:
    """The accepted record of the highest attempt: it may have been committed, and must be proposed unchanged."""
    held = [
        (join.ready_attempt, join.ready)
        for peer, join in joins
        if (peer, join.incarnation) in voters and join.ready_attempt is not None and join.ready is not None
    ]
    return max(held, key=lambda pair: pair[0])[1] if held else None
