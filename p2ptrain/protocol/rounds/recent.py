"""Whose fragments are merged: those of peers that contributed to one of the last few committed rounds. Pure.

A fragment changes weights at once, and nobody votes on it. So a peer must first bring an outer gradient that a quorum
of voters has committed. Until then it merges the fragments of others, and its inner optimizer warms up meanwhile.

Only these peers need to be named by a record: strangers that never contribute could else have every round refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.protocol.wire.messages import Head
from p2ptrain.protocol.wire.transport import PeerId

# A slow peer, or one whose link fails now and then, misses a few rounds. Of more than 64 members, 64 contribute to each
# round: with 200 members, a given one is in at least one of eight with a probability of 95 %.
RECENT_ROUNDS = 8


@dataclass(frozen=True)
class RecentContributors:
    """The contributors of the last `RECENT_ROUNDS` rounds that this peer knows.

    A joiner knows only the record of its head. Before the first round, and in runs without rounds, everybody counts.

    Attributes:
        lineage: of our head.
        rounds: the number and the contributors of each round, oldest first.
    """

    lineage: str = ""
    rounds: tuple[tuple[int, frozenset[PeerId]], ...] = ()

    def after(self, head: Head) -> RecentContributors:
        """The contributors after a new head, which follows from a round or from an adopted state."""
        record = head.record
        if record is None:
            return RecentContributors(head.lineage)
        # A new lineage begins with the last record of the one before.
        known = self.rounds if self.lineage in (head.lineage, record.lineage) else ()
        kept = [of for of in known if record.round - RECENT_ROUNDS < of[0] < record.round]
        newest = frozenset(contributor.peer_id for contributor in record.contributors)
        return RecentContributors(head.lineage, (*kept, (record.round, newest)))

    def admits(self, peer_id: PeerId) -> bool:
        """Whether fragments of this peer are merged; if not, it need not push any."""
        return not self.rounds or any(peer_id in contributors for _, contributors in self.rounds)
