"""Who decides a round: its voters, the contributors of the round before, and how many of them it takes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from p2ptrain.protocol.wire.messages import Record
from p2ptrain.protocol.wire.serialization import pack_value
from p2ptrain.protocol.wire.transport import PeerId

Voter = tuple[PeerId, str]

# Deciders of a round. 31 votes are plenty, and bound the leader's wait in large swarms (guess).
MAX_VOTERS = 31


def record_sha256(record: Record) -> str:
    """The name of a record: two peers that commit the same name commit the same bytes."""
    return hashlib.sha256(pack_value(record)).hexdigest()


def voters_of(record: Record) -> tuple[Voter, ...]:
    """The contributors, in the record's order, as voters of the next round. A peer that is listed twice votes once."""
    first = {c.peer_id: c.incarnation for c in reversed(record.contributors)}
    listed = dict.fromkeys(c.peer_id for c in record.contributors)
    return tuple((peer, first[peer]) for peer in listed)[:MAX_VOTERS]


def is_quorum(present: Collection[Voter], voters: Sequence[Voter]) -> bool:
    """Whether `present` holds more than half of the voters, or exactly half and the first listed.

    So any two quorums share a voter.
    """
    count = sum(voter in present for voter in voters)
    return 2 * count > len(voters) or (2 * count == len(voters) > 0 and voters[0] in present)
