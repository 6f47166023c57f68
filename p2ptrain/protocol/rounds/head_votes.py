"""The signatures under one peer's head, which it passes on to those who adopt its state.

Each voter signs the head that it has when a round has landed, and sends that to all (Landed). So a joiner need not
trust its donor: a quorum of the voters has signed this state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from p2ptrain.protocol.rounds.proof import Prover
from p2ptrain.protocol.rounds.quorum import Voter, is_quorum
from p2ptrain.protocol.wire.messages import Head, Landed, Vote
from p2ptrain.protocol.wire.transport import PeerId

# Peers whose Landed for another head is kept until we have that head: as many as can be linked.
MAX_EARLY = 256


class HeadVotes:
    """Collects the votes for the current head."""

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
        """Whether one of these voters of our head has not landed it yet, as far as we know."""
        return self._head is not None and any(v in present and v not in self._votes for v in self._head.voters)

    @property
    def quorum(self) -> tuple[Vote, ...] | None:
        """The votes, if they are a quorum."""
        if self._head is None or not is_quorum(self._votes.keys(), self._head.voters):
            return None
        return tuple(self._votes.values())
