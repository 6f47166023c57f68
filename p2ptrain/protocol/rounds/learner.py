"""The proof of a Commit. Any peer can send one; it is believed if it names our own READY record, or if a quorum of
voters, each asked by us, reports that it accepted that record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2ptrain.protocol.rounds.quorum import Voter, is_quorum, record_sha256
from p2ptrain.protocol.wire.messages import Accepted, Record
from p2ptrain.protocol.wire.transport import PeerId

# Unproven records kept: one for each of the last peers that sent one (guess).
MAX_HEARD = 8
# Interval and number of queries of the voters (guess: long enough for a voter that is about to learn it).
ASK_AGAIN_S, MAX_ASKS = 2.0, 3


def is_shown(sha256: str, claims: Iterable[tuple[Voter, Accepted]], voters: Sequence[Voter]) -> bool:
    """Whether a quorum reports that it accepted this record in the same attempt.

    Acceptances in two attempts do not add up: another record may have been accepted in between. A voter that committed
    the record has seen such a quorum, and counts for any attempt.
    """
    same = [(voter, claim.attempt) for voter, claim in claims if claim.record_sha256 == sha256]
    return any(is_quorum({voter for voter, named in same if named in (None, attempt)}, voters) for _, attempt in same)


@dataclass(frozen=True, slots=True)
class Learner:
    """Unproven records (`heard`), the last claim of each voter, and the record once learned.

    `ask_again_s` is when to ask the voters again; infinite if there is nothing to ask.
    """

    heard: tuple[tuple[PeerId, Record], ...] = ()
    claims: tuple[tuple[Voter, Accepted], ...] = ()
    asks: int = 0
    ask_again_s: float = math.inf
    record: Record | None = None

    @property
    def gives_up(self) -> bool:
        """Whether the voters have been asked `MAX_ASKS` times."""
        return self.asks >= MAX_ASKS

    def hear(self, peer: PeerId, record: Record, now: float) -> Learner:
        """After a Commit from a peer; the voters are asked now."""
        others = [(other, named) for other, named in self.heard if other != peer]
        return dataclasses.replace(
            self, heard=(*others, (peer, record))[-MAX_HEARD:], asks=1, ask_again_s=now + ASK_AGAIN_S
        )

    def claim(self, voter: Voter, claim: Accepted) -> Learner:
        """After a claim of a voter."""
        claims = sorted({**dict(self.claims), voter: claim}.items(), key=lambda pair: pair[0])
        return dataclasses.replace(self, claims=tuple(claims))

    def asked(self, now: float) -> Learner:
        """After asking the voters once more, or giving up."""
        if self.gives_up:
            return Learner(claims=self.claims)
        return dataclasses.replace(self, asks=self.asks + 1, ask_again_s=now + ASK_AGAIN_S)

    def shown(self, own: Record | None, voters: Sequence[Voter]) -> Record | None:
        """A record from a Commit that is our own READY record, or was accepted by a quorum."""
        for _, record in self.heard:
            if record == own or is_shown(record_sha256(record), self.claims, voters):
                return record
        return None


NOTHING_HEARD = Learner()
