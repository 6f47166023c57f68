"""What peers sign, and the check that a quorum has signed. Pure.

| signed | by | proves |
|---|---|---|
| READY of a record | each voter | a Commit: a quorum accepted the record in one attempt |
| a head | each voter of it | a SignedHead: a quorum reached this state by its last record |
| a founding | the founder | who began a lineage, and from which head |

Every statement names its kind and the run digest, so no signature is valid for anything else. A signature says what its
owner claimed, not that it is true: whoever owns a quorum of the voters can prove anything
(docs/understand/security.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.quorum import Voter, is_quorum, voters_of
from p2ptrain.protocol.wire.messages import Commit, Founding, Head, Landed, Ready, SignedHead, Vote
from p2ptrain.protocol.wire.transport import Signer


def _statement(kind: str, digest: str, *fields: object) -> bytes:
    return msgspec.msgpack.encode((f"p2ptrain {kind}", digest, *fields))


def ready_statement(digest: str, ready: Ready) -> bytes:
    """What READY says: this incarnation accepted this record in this attempt."""
    return _statement("ready", digest, ready.lineage, ready.round, ready.attempt, ready.incarnation,
                      ready.record_sha256)  # fmt: skip


def head_statement(digest: str, head: Head, incarnation: str) -> bytes:
    """What a voter of a head says of it: everything that a joiner takes over."""
    fields = head.genesis, head.lineage, head.round, head.state_hash, head.anchor_hash, head.voters
    return _statement("head", digest, *fields, head.run_step, head.tokens_total, incarnation)


def founding_statement(digest: str, founding: Founding) -> bytes:
    """What a founder says: its lineage goes on from there."""
    return _statement("founding", digest, founding.parent, founding.round, founding.state_hash, founding.founder,
                      founding.incarnation)  # fmt: skip


class Prover:
    """Signs as one incarnation of one peer, and checks what others have signed.

    Args:
        digest: of the run; part of every statement.
    """

    def __init__(self, signer: Signer, incarnation: str, digest: str) -> None:
        self._signer = signer
        self._incarnation = incarnation
        self._digest = digest

    def signed_ready(self, ready: Ready) -> Ready:
        """Our READY with our signature."""
        return msgspec.structs.replace(ready, signature=self._signer.sign(ready_statement(self._digest, ready)))

    def verify_ready(self, sender: str, ready: Ready) -> None:
        """Raises WireError unless its sender signed it."""
        if not self._signer.verify(sender, ready_statement(self._digest, ready), ready.signature):
            raise WireError("a READY that its sender has not signed")

    def verify_commit(self, commit: Commit, voters: Sequence[Voter]) -> None:
        """Raises WireError unless a quorum of these voters signed READY for the record, in one attempt."""
        record, sha256 = commit.record, commit.record.sha256

        def statement(incarnation: str) -> bytes:
            ready = Ready(record.lineage, record.round, commit.attempt, incarnation, sha256, b"")
            return ready_statement(self._digest, ready)

        self._verify_quorum(commit.votes, voters, statement, f"a Commit of round {record.round}")

    def landed(self, head: Head) -> Landed:
        """Our signature under our head, for the others."""
        return Landed(head.lineage, head.round, self._incarnation, self.signature_of(head))

    def signature_of(self, head: Head) -> bytes:
        """Our signature under a head."""
        return self._signer.sign(head_statement(self._digest, head, self._incarnation))

    def vote_of(self, sender: str, landed: Landed, head: Head) -> Vote | None:
        """The vote in a Landed for this head; None if its sender is no voter, or has signed another state."""
        if (sender, landed.incarnation) not in head.voters:
            return None
        statement = head_statement(self._digest, head, landed.incarnation)
        if not self._signer.verify(sender, statement, landed.signature):
            return None
        return Vote(sender, landed.incarnation, landed.signature)

    def verify_head(self, signed: SignedHead) -> None:
        """Raises WireError unless a quorum of its voters has signed the head, and its last record made it."""
        head = signed.head
        self._verify_quorum(
            signed.votes, head.voters, lambda incarnation: head_statement(self._digest, head, incarnation), "a head"
        )
        record = head.record
        if record is not None and record.lineage == head.lineage:
            same = (record.genesis, record.round, record.run_step, record.tokens_total)
            if same != (head.genesis, head.round, head.run_step, head.tokens_total) or head.voters != voters_of(record):
                raise WireError("a head that its last record does not lead to")

    def founding(self, parent: str, round_: int, state_hash: str) -> Founding:
        """Our founding of a lineage, signed."""
        founder = self._signer.peer_id
        unsigned = Founding(parent, round_, state_hash, founder, self._incarnation, b"")
        return msgspec.structs.replace(
            unsigned, signature=self._signer.sign(founding_statement(self._digest, unsigned))
        )

    def verify_founding(self, founding: Founding) -> None:
        """Raises WireError unless its founder signed it."""
        statement = founding_statement(self._digest, founding)
        if not self._signer.verify(founding.founder, statement, founding.signature):
            raise WireError("the founding of a lineage that its founder has not signed")

    def _verify_quorum(
        self, votes: Iterable[Vote], voters: Sequence[Voter], statement: Callable[[str], bytes], what: str
    ) -> None:
        named = {(vote.peer_id, vote.incarnation): vote for vote in votes}
        if not is_quorum(named.keys(), voters):
            raise WireError(f"{what} without a quorum of its {len(voters)} voters")
        for voter in voters:
            vote = named.pop(voter, None)
            if vote and not self._signer.verify(vote.peer_id, statement(vote.incarnation), vote.signature):
                raise WireError(f"{what} with a wrong signature of {vote.peer_id[:60]!r}")
        if named:
            raise WireError(f"{what} with votes of others than its voters")
