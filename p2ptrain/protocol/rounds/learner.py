"""What one peer has heard of a round's outcome, and whether it is shown to be right.

Anybody can say Commit. It counts when it names our own READY record, or when a quorum of voters, each asked by
ourselves, says that it accepted that record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2ptrain.protocol.rounds.quorum import Voter, is_quorum, record_sha256
from p2ptrain.protocol.wire.messages import Accepted, Record
from p2ptrain.protocol.wire.transport import PeerId

# Records that are kept until they are shown to be right: one for each of the last peers that named one (guess).
MAX_HEARD = 8
# Ask the voters again after this, and so many times in all (guess: long enough for a voter that is about to learn it).
ASK_AGAIN_S, MAX_ASKS = 2.0, 3


def is_shown(sha256: str, claims: Iterable[tuple[Voter, Accepted]], voters: Sequence[Voter]) -> bool:
    """Whether a quorum says that it accepted this record in one and the same attempt.

    Acceptances of one record in two attempts do not add up: another record may have been accepted in between. Who has
    committed the record has seen such a quorum, and counts for any attempt.
    """
    same = [(voter, claim.attempt) for voter, claim in claims if claim.record_sha256 == sha256]
    return any(is_quorum({voter for voter, named in same if named in (None, attempt)}, voters) for _, attempt in same)


@dataclass(frozen=True, slots=True)
class Learner:
    """The records heard of, what voters claim to have accepted (the last word of each), and the record once learned.

    `ask_again_s` is when to ask the voters again; infinite while there is nothing to ask about.
    """

    heard: tuple[tuple[PeerId, Record], ...] = ()
    claims: tuple[tuple[Voter, Accepted], ...] = ()
    asks: int = 0
    ask_again_s: float = math.inf
    record: Record | None = None

    @property
    def gives_up(self) -> bool:
        """Whether the voters have been asked often enough."""
        return self.asks >= MAX_ASKS

    def hear(self, peer: PeerId, record: Record, now: float) -> Learner:
        """A peer says that this record was committed; the voters are asked now."""
        others = [(other, named) for other, named in self.heard if other != peer]
        return dataclasses.replace(
            self, heard=(*others, (peer, record))[-MAX_HEARD:], asks=1, ask_again_s=now + ASK_AGAIN_S
        )

    def claim(self, voter: Voter, claim: Accepted) -> Learner:
        """A voter says what it accepted."""
        claims = sorted({**dict(self.claims), voter: claim}.items(), key=lambda pair: pair[0])
        return dataclasses.replace(self, claims=tuple(claims))

    def asked(self, now: float) -> Learner:
        """After asking the voters once more, or giving up."""
        if self.gives_up:
            return Learner(claims=self.claims)
        return dataclasses.replace(self, asks=self.asks + 1, ask_again_s=now + ASK_AGAIN_S)

    def shown(self, own: Record | None, voters: Sequence[Voter]) -> Record | None:
        """A record that was heard of and is our own READY record, or was accepted by a quorum."""
        for _, record in self.heard:
            if record == own or is_shown(record_sha256(record), self.claims, voters):
                return record
        return None


NOTHING_HEARD = Learner()
