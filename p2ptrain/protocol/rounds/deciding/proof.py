"""What peers sign so that others need not trust them. Pure.

| signed | by | proves |
|---|---|---|
| a view | each voter that joins a round | whom it sees, which decides who votes next (`voters`) |
| READY of a record | each voter | a Commit: a quorum accepted the record in one attempt |
| a head | each voter of it | a SignedHead: a quorum reached this state by its last record |
| a founding | the founder | who began a lineage, and from which head |

Every statement names its kind and the run digest, so no signature is valid for anything else. A signature says what its
owner claimed, not that it is true: whoever owns a quorum of the voters can prove anything
(docs/understand/security.md).

Each voter signs the head that it has when a round has landed, and sends that to all (Landed). So a joiner need not
trust its donor: `HeadVotes` passes on the signatures of a quorum of the voters under this state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.voters import Voter, check_voters, is_quorum
from p2ptrain.protocol.wire.messages import (
    Commit,
    Founding,
    Head,
    Landed,
    Proposal,
    Ready,
    SignedHead,
    View,
    Vote,
)
from p2ptrain.protocol.wire.transport import PeerId, Signer

# Peers whose Landed for another head is kept until we have that head: as many as can be linked.
MAX_EARLY = 256


def _statement(kind: str, digest: str, *fields: object) -> bytes:
    return msgspec.msgpack.encode((f"p2ptrain {kind}", digest, *fields))


def view_statement(digest: str, head: Head, view: View) -> bytes:
    """What a view says: whom this incarnation sees as it joins the round after a head."""
    return _statement("view", digest, head.lineage, head.round + 1, view.incarnation, view.seen)


def ready_statement(digest: str, ready: Ready) -> bytes:
    """What READY says: this incarnation accepted this record in this attempt."""
    return _statement(
        "ready", digest, ready.lineage, ready.round, ready.attempt, ready.incarnation, ready.record_sha256
    )


def head_statement(digest: str, head: Head, incarnation: str) -> bytes:
    """What a voter of a head says of it: everything that a joiner takes over."""
    fields = head.genesis, head.lineage, head.round, head.state_hash, head.anchor_hash, head.voters
    return _statement("head", digest, *fields, head.run_step, head.tokens_total, incarnation)


def founding_statement(digest: str, founding: Founding) -> bytes:
    """What a founder says: its lineage goes on from there."""
    return _statement(
        "founding", digest, founding.parent, founding.round, founding.state_hash, founding.founder, founding.incarnation
    )


class Prover:
    """Signs as one incarnation of one peer, and checks what others have signed.

    Args:
        digest: of the run; part of every statement.
    """

    def __init__(self, signer: Signer, incarnation: str, digest: str) -> None:
        self._signer = signer
        self._incarnation = incarnation
        self._digest = digest

    def view(self, head: Head, seen: bytes) -> View:
        """Our view in the round after a head, signed."""
        unsigned = View(self._signer.peer_id, self._incarnation, seen, b"")
        return msgspec.structs.replace(
            unsigned, signature=self._signer.sign(view_statement(self._digest, head, unsigned))
        )

    def verify_view(self, view: View, head: Head) -> None:
        """Raises WireError unless its owner signed it for the round after this head."""
        if not self._signer.verify(view.peer_id, view_statement(self._digest, head, view), view.signature):
            raise WireError("a view that its owner has not signed")

    def verify_proposal(self, proposal: Proposal, head: Head) -> None:
        """Raises WireError unless the record after a head has the voters that views show, and they are signed."""
        check_voters(proposal, head)
        for view in proposal.views:
            self.verify_view(view, head)

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
            if same != (head.genesis, head.round, head.run_step, head.tokens_total) or head.voters != record.voters:
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


class HeadVotes:
    """Collects the votes for the current head of one peer."""

    def __init__(self, prover: Prover, own: Voter) -> None:
        self._prover = prover
        self._own = own
        self._head: Head | None = None
        self._votes: dict[Voter, Vote] = {}
        self._early: dict[PeerId, Landed] = {}

    def begin(self, head: Head, votes: Sequence[Vote]) -> Landed | None:
        """Collect votes for this head, beginning with those that came with it.

        Returns our own, to be sent; None if we are not a voter of this head, so that nobody would count it.
        """
        self._head = head
        self._votes = {(vote.peer_id, vote.incarnation): vote for vote in votes}
        early, self._early = self._early, {}
        for sender, landed in early.items():
            self.note(sender, landed)
        return self._prover.landed(head) if self._own in head.voters else None

    def note(self, sender: PeerId, landed: Landed) -> None:
        """Count a Landed that one of our head's voters signed for it. One for another head is kept for later."""
        head = self._head
        if head is None or (landed.lineage, landed.round) != (head.lineage, head.round):
            if sender in self._early or len(self._early) < MAX_EARLY:
                self._early[sender] = landed
            return
        if (sender, landed.incarnation) not in self._votes:
            vote = self._prover.vote_of(sender, landed, head)
            if vote is not None:
                self._votes[sender, landed.incarnation] = vote

    def note_lost(self, sender: PeerId) -> None:
        """The link to a peer broke: forget what it sent too early."""
        self._early.pop(sender, None)

    def is_landing(self, present: Collection[Voter]) -> bool:
        """Whether one of these voters that contributed to our head has not landed it yet, as far as we know."""
        if self._head is None:
            return False
        awaited = self._head.contributors.intersection(self._head.voters, present)
        return not awaited <= self._votes.keys()

    @property
    def quorum(self) -> tuple[Vote, ...] | None:
        """The votes, if they are a quorum."""
        if self._head is None or not is_quorum(self._votes.keys(), self._head.voters):
            return None
        return tuple(self._votes.values())
