"""Who decides a round, and what a voter may promise and accept (single-decree Paxos for each lineage and round).

The voters of a round are the contributors of the one before it. A quorum is more than half of them, or exactly half
with the first listed, so that any two quorums share a voter. A voter's promises live in memory only: restarted, it
has another incarnation and is no voter until it is included again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from p2ptrain.protocol.wire.messages import Attempt, Record
from p2ptrain.protocol.wire.serialization import pack_value
from p2ptrain.protocol.wire.transport import PeerId

# Deciders of a round. 31 votes are plenty, and bound the leader's wait in large swarms (DESIGN.md).
MAX_VOTERS = 31
# Lower than every real attempt.
NO_ATTEMPT = Attempt(-1, "")

Voter = tuple[PeerId, str]


def record_sha256(record: Record) -> str:
    """The name of a record: two peers that commit the same name commit the same bytes."""
    return hashlib.sha256(pack_value(record)).hexdigest()


def voters_of(record: Record) -> tuple[Voter, ...]:
    """The contributors, in the record's order, as voters of the next round."""
    return tuple((c.peer_id, c.incarnation) for c in record.contributors[:MAX_VOTERS])


def is_quorum(present: Collection[Voter], voters: Sequence[Voter]) -> bool:
    """Whether `present` holds more than half of the voters, or exactly half and the first listed."""
    count = sum(voter in present for voter in voters)
    return 2 * count > len(voters) or (2 * count == len(voters) > 0 and voters[0] in present)


def leader_order(
    lineage: str, round_: int, counter: int, voters: Iterable[PeerId], others: Iterable[PeerId]
) -> list[PeerId]:
    """Candidates to lead an attempt, best first: voters before others, shuffled anew for each attempt by a hash."""

    def rank(peer_id: PeerId) -> bytes:
        return hashlib.blake2b(f"{lineage}/{round_}/{counter}/{peer_id}".encode(), digest_size=8).digest()

    first = sorted(set(voters), key=rank)
    return first + sorted(set(others) - set(first), key=rank)


@dataclass(slots=True)
class Ballot:
    """One peer's vote in one round. Survives attempts; a new round starts a new ballot."""

    promised: Attempt = NO_ATTEMPT
    ready_attempt: Attempt | None = None
    ready: Record | None = None

    def promise(self, attempt: Attempt) -> bool:
        """Promise to refuse lower attempts. False, and nothing changes, when a higher one was promised."""
        if attempt < self.promised:
            return False
        self.promised = attempt
        return True

    def accept(self, attempt: Attempt, record: Record) -> bool:
        """Store READY for a record. False, and nothing changes, when a higher attempt was promised."""
        if attempt < self.promised:
            return False
        self.promised = self.ready_attempt = attempt
        self.ready = record
        return True


def highest_ready(joins: Iterable[tuple[Attempt | None, Record | None]]) -> Record | None:
    """The READY record of the highest attempt, which must be finished unchanged."""
    held = [(attempt, record) for attempt, record in joins if attempt is not None and record is not None]
    return max(held, key=lambda pair: pair[0])[1] if held else None
