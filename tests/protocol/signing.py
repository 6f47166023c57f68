"""Heads, commits and histories that are signed as real ones, for tests that make them up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.rounds.deciding.history import lineage_of
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.wire.messages import (
    Attempt,
    Commit,
    Contributor,
    Entry,
    Founding,
    Head,
    Ready,
    Record,
    SignedHead,
    Vote,
)

SIGNERS = MemoryNetwork()


def prover_of(name: str, digest: str) -> Prover:
    """What the first incarnation of a peer signs with."""
    return Prover(SIGNERS.transport(name), f"{name}.1", digest)


def genesis_of(founder: str, digest: str, state_hash: str = "0" * 64) -> Founding:
    return prover_of(founder, digest).founding(digest, -1, state_hash)


def founding_of(founder: str, parent: str, round_: int, digest: str) -> Entry:
    return Entry(None, prover_of(founder, digest).founding(parent, round_, "0" * 64))


def signed_by(names: Sequence[str], record: Record, digest: str, attempt: Attempt | None = None) -> Commit:
    """A Commit with the READY of these peers."""
    attempt = attempt or Attempt(1, names[0], f"{names[0]}.1")
    votes = []
    for name in names:
        ready = Ready(record.lineage, record.round, attempt, f"{name}.1", record.sha256, b"")
        votes.append(Vote(name, f"{name}.1", prover_of(name, digest).signed_ready(ready).signature))
    return Commit(record, attempt, tuple(votes))


def record_after(genesis: str, lineage: str, round_: int, contributors: str, **changes: object) -> Record:
    """A record of a round of these contributors, who are the next voters."""
    named = tuple(Contributor(name, f"{name}.1", 1.0, bytes(32)) for name in contributors)
    voters = tuple((name, f"{name}.1") for name in contributors)
    plain = Record(
        genesis, lineage, round_, "0" * 64, named, (), "sgd", 1.0, 0.0, round_, round_, (), 0.0, 0.0,
        voters,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def signed_head(head: Head, genesis: Founding, digest: str, names: Sequence[str]) -> SignedHead:
    votes = tuple(Vote(n, f"{n}.1", prover_of(n, digest).signature_of(head)) for n in names)
    return SignedHead(head, votes, genesis)


class Past:
    """A history that tests write: `commit` and `found` add to it.

    Attributes:
        lineage, round: where it stands.
    """

    def __init__(self, digest: str, founder: str = "a") -> None:
        self.digest = digest
        self.genesis = genesis_of(founder, digest)
        self.lineage = self.genesis_id = lineage_of(self.genesis)
        self.round = -1
        self.voters = founder
        self.entries = [Entry(None, self.genesis)]

    def copy(self) -> Past:
        other = Past.__new__(Past)
        other.__dict__.update(self.__dict__, entries=list(self.entries))
        return other

    def commit(self, contributors: str, signers: str = "", **changes: object) -> Past:
        """A round of these contributors, signed by the voters of the round before, or by others."""
        record = record_after(self.genesis_id, self.lineage, self.round + 1, contributors, **changes)
        self.entries.append(Entry(signed_by(signers or self.voters, record, self.digest), None))
        self.round, self.voters = self.round + 1, contributors
        return self

    def found(self, founder: str) -> Past:
        """A lineage that goes on from here."""
        entry = founding_of(founder, self.lineage, self.round, self.digest)
        assert entry.founding is not None
        self.entries.append(entry)
        self.lineage, self.voters = lineage_of(entry.founding), founder
        return self
