"""Which start of the run a peer follows before its first round, if the run was started more than once.

Peers that had not met, or a founder that was restarted, begin the same run apart, and no history can say which start is
the right one. So before its first round a peer counts its links. After it, starts stay apart, and it warns.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

import trio

from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.membership.neighbours import RELINKED_WITHIN_S
from p2ptrain.protocol.rounds.deciding.lineage import is_fresh
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.joining import Joining
from p2ptrain.protocol.wire.messages import Beat, Head
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# What proves the history of another start: a quorum's signatures since its founding, or besides them lineages that were
# founded since; or most of those who are in it show the same head; or ("") nothing.
Proof = Literal["unbroken", "rooted", "shown by most", ""]
# A founder that was restarted goes back to its earlier start with a peer that it has been linked with for so long: it
# should have met the others by then, to count them (guess). A member that has been linked with it for twice as long
# goes with it, as it has not come back.
GOES_BACK_AFTER_S, GOES_WITH_AFTER_S = 5.0, 10.0
# A peer of another start of the run may still follow us, as one of us is its initial peer. After this long it
# will not (guess).
OTHER_START_S = 10.0
JOINED = (
    "joined the start of run %r that %s founded: the run was started twice, and this peer had no round with others "
    "yet%s"
)
OLD_TICKETS = (
    ". Tickets that this peer printed earlier name the old founder, and are refused: give its address, or a new ticket"
)


class Starts:
    """The starts of the run that this peer meets, and its own."""

    def __init__(self, driver: RoundDriver, joining: Joining, *, may_found: bool) -> None:
        self._driver = driver
        self._context = driver.context
        self._joining = joining
        self._may_found = may_found
        # Linked peers of another start that has rounds, as ours has: which start, and since when.
        self._apart: dict[PeerId, tuple[str, float]] = {}
        self._has_warned = False

    def is_trusted(self, donor: Link | None, other: Head, quorum_s: float) -> bool:
        """Whether to follow a peer, or (None) what our user gave, where no history proves anything.

        Args:
            quorum_s: when we last had a quorum of our voters, which prove more than a count of links.
        """
        if donor is None or self._is_named(donor):
            return True
        if self._context.swarm_size():
            return False  # our links are a few of many, and strangers may be most of them
        here, there = self._links_in(other)
        # Our line may have been down, and a stranger be the first to be back.
        was_awaited = trio.current_time() - max(donor.opened_s, quorum_s) >= RELINKED_WITHIN_S
        return was_awaited and there > here and not self._context.links.chosen and not self._started_here()

    def follows(self, donor: Link | None, other: Head | Beat, founder: PeerId, proof: Proof) -> bool | None:
        """Whether we, without a round, go to the start of a peer, or (None) of our user; None if histories decide.

        Args:
            founder: of the other start; "" if it is not known yet.
            proof: what is known of the peer's history. Without any it may be made up.
        """
        if donor is None:
            return None
        if self._goes_with_founder(donor):
            return True
        both_are_ours = founder in ("", self._context.peer_id) and self._driver.founder == self._context.peer_id
        # Our signature on its first round suffices; otherwise it must be larger.
        if both_are_ours and ((proof == "unbroken" and other.round >= 0) or self._goes_back(donor, other)):
            return bool(proof)
        # Of a founder that the user named, histories do not decide: it may still come back to our start.
        if self._is_named(donor) and donor.peer_id != self._driver.founder:
            return None
        return bool(proof) and self._follows_stranger(other)

    def is_newly_linked(self, donor: Link) -> bool:
        """Whether others of this peer's start, who would count, may not be linked yet."""
        return trio.current_time() - donor.opened_s < GOES_BACK_AFTER_S

    def joined(self, donor: Link, founder: PeerId) -> None:
        """We are about to take the state of another start, with this founder."""
        self._joining.from_initial_peer = self._is_named(donor)
        logger.warning(
            JOINED, self._context.run.run_id, shown(founder), "" if founder == self._driver.founder else OLD_TICKETS
        )

    def warn_of_other(self, link: Link, beat: Beat) -> None:
        """Warn, once, if a partner trains another start of the run for OTHER_START_S, and both have rounds."""
        head, run, now = self._driver.head, self._context.run, trio.current_time()
        is_apart = beat.lineage and beat.genesis != head.genesis and not is_fresh(head, run) and not is_fresh(beat, run)
        if not is_apart or self._has_warned:
            self._apart.pop(link.peer_id, None)
            return
        live = self._context.links.live
        self._apart = {peer: entry for peer, entry in self._apart.items() if peer in live}
        genesis, since_s = self._apart.get(link.peer_id, ("", now))
        if genesis != beat.genesis:
            self._apart[link.peer_id] = beat.genesis, now
        elif now - since_s >= OTHER_START_S:
            self._has_warned = True
            logger.warning(
                "%s trains another start of run %r: the swarm is split, and only peers of one start average with each "
                "other. Choose the one to keep, and restart each peer of the other with --initial-peers and the "
                "address of a peer of the kept one: what it trained apart is lost",
                link.peer_id,
                run.run_id,
            )

    def _is_named(self, donor: Link) -> bool:
        """Whether the user named this peer as an initial peer."""
        return donor.peer_id in self._context.links.chosen

    def _started_here(self) -> bool:
        """Whether our user started the run: this peer founded it, and was given no peer to ask."""
        return self._may_found or (self._driver.founder == self._context.peer_id and not self._context.links.chosen)

    def _goes_back(self, donor: Link, other: Head | Beat) -> bool:
        """Whether another start of our own is larger, and we have had the time to meet those who are in it."""
        return not self.is_newly_linked(donor) and self._is_larger(other)

    def _goes_with_founder(self, donor: Link) -> bool:
        """Whether to go with the founder of our start to the one where it is, as it does not come back.

        Not if our user started the run, or gave an initial peer that we have its state from, but not this one.
        """
        now = trio.current_time()
        # While it downloads our start's state it is about to come back.
        if (
            donor.peer_id != self._driver.founder
            or now - donor.opened_s < GOES_WITH_AFTER_S
            or now < donor.joining_until_s
        ):
            return False
        is_bound = self._joining.from_initial_peer and not self._is_named(donor)
        return not is_bound and not self._started_here()

    def _follows_stranger(self, other: Head | Beat) -> bool:
        """Whether to leave our start for a larger one of strangers.

        Never if our user started the run, or we have it from an initial peer.
        """
        is_bound = self._started_here() or self._joining.from_initial_peer
        return not is_bound and self._driver.founder not in self._context.links.chosen and self._is_larger(other)

    def _is_larger(self, other: Head | Beat) -> bool:
        """Whether more of our links are in another start than in ours, we counted; see `is_larger_start`."""
        here, there = self._links_in(other)
        return is_larger_start(self._driver.head.genesis, other, here, there)

    def _links_in(self, other: Head | Beat) -> tuple[int, int]:
        """How many of our links are in our lineage, we counted, and in another one.

        Of each start only one lineage counts, ours and the other's, as anybody can begin one: none are in the other one
        if another lineage of its start has more.
        """
        beats = [link.beat for link in self._context.links.trainers() if link.beat and link.beat.lineage]
        lineages = Counter(beat.lineage for beat in beats if beat.genesis == other.genesis)
        here, there = 1 + sum(beat.lineage == self._driver.head.lineage for beat in beats), lineages[other.lineage]
        return here, there if there == max(lineages.values(), default=0) else 0


def is_larger_start(genesis: str, other: Head | Beat, here: int, there: int) -> bool:
    """Whether a peer without a round leaves its start of the run, `genesis`, for another one.

    The larger one goes on; of two as large that which has a round, else that with the smaller id. Counts of peers are
    of the links of this peer, itself among `here`, so that a stranger alone wins no swarm.
    """
    return (there, other.round >= 0, other.genesis < genesis) > (here, False, False)
