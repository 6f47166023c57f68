"""Compares a checkpoint, with which a peer starts, with the states of live peers: which of them continues."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.history import History, ends_at, shared
from p2ptrain.protocol.rounds.deciding.lineage import is_fresh
from p2ptrain.protocol.state_sync.provenance import NotNowError, ask_head, ask_history, is_preferred
from p2ptrain.protocol.wire.messages import Entry, Head
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The state from a checkpoint, with the history that leads to it. It may be newer or older than the swarm's.

    Attributes:
        tokens: trained on since our outer gradient was last in a mean; None for those of the exchange.
        ours: whether it is the state of this process's last node, which failed. It is not compared with the pins again,
            as the pinned record may be older than the history.
        from_initial_peer: of such a state, whether it came from a peer that the user named.
    """

    state: AnchorState
    head: Head
    run_step: int
    history: History
    tokens: int | None = None
    ours: bool = False
    from_initial_peer: bool = False


class Checkpoint:
    """Compares a restored state with those of donors.

    Attributes:
        is_ahead: whether a donor's state was found to be older.
    """

    def __init__(self, restored: Restored, context: RoundContext) -> None:
        self.is_ahead = False
        self._restored = restored
        self._context = context

    async def compare(self, donor: Link) -> Literal["ours", "theirs", "unknown", "not now"]:
        """Which state continues: that of our checkpoint, or the donor's. "unknown" if the two cannot be compared.

        "not now" if the donor cannot prove its state at the moment, as it may be about to begin a lineage: ask again.
        """
        ours = self._restored.history.entries
        try:
            signed = await ask_head(self._context, donor)
            theirs = await ask_history(self._context, donor, signed.head, ours)
        except (PeerLostError, WireError) as error:
            logger.info("comparing the checkpoint with the state of %s: %s", donor.peer_id, error)
            return "not now" if isinstance(error, NotNowError) else "unknown"
        outcome = self.continues(donor, signed.head, theirs)
        if outcome == "ours":
            self.is_ahead = True
        elif outcome == "unknown":
            logger.warning(
                "%s has a state of run %r that does not continue the checkpoint, so it is ignored. If it is your run, "
                "give that peer in --initial-peers",
                donor.peer_id,
                self._context.run.run_id,
            )
        elif shared(ours, theirs) is None and not self.joins_anew:
            logger.warning(
                "the checkpoint is of another start of run %r, or too old to be compared; taking the state of initial "
                "peer %s",
                self._context.run.run_id,
                donor.peer_id,
            )
        return outcome

    def continues(self, donor: Link, head: Head, theirs: Sequence[Entry]) -> Literal["ours", "theirs", "unknown"]:
        """As `compare`, for a donor's head and its history."""
        ours = self._restored.history.entries
        if shared(ours, theirs) is not None:
            elsewhere = self._elsewhere(head)
            is_later = is_preferred(self._restored.head, ours, head, theirs, elsewhere, is_trusted=False)
            return "theirs" if is_later or ends_at(ours, head) else "ours"
        is_chosen = donor.peer_id in self._context.links.chosen
        return "theirs" if is_chosen or self.joins_anew else "unknown"

    def _elsewhere(self, head: Head) -> set[PeerId]:
        """Linked peers that have not gone to a head's lineage: the word of voters of ours counts against it.

        Of those that still join only if no voter of ours has gone there, as voters with checkpoints take turns.
        """
        voters = {peer_id for peer_id, _ in self._restored.head.voters}
        count_joining = voters.isdisjoint(peer_id for peer_id, _ in head.voters)
        return {
            link.peer_id
            for link in self._context.links.trainers()
            if link.beat and link.beat.lineage != head.lineage and (link.beat.lineage or count_joining)
        }

    @property
    def joins_anew(self) -> bool:
        """Whether a checkpoint counts for no more than joining for the first time, as nothing was averaged yet.

        Not if our user started the run, or the state is that of an initial peer.
        """
        genesis, context = self._restored.history.genesis, self._context
        started_here = not context.links.chosen and genesis is not None and genesis.founder == context.peer_id
        return is_fresh(self._restored.head, context.run) and not started_here and not self._restored.from_initial_peer
