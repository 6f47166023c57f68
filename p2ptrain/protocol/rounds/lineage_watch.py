"""For how long a quorum of the voters was missing, and whether the lineage has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from p2ptrain.protocol.rounds.deciding import lineage
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.wire.messages import Head
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# The least that voters that fell silent are waited for.
QUORUM_LOST_S = 60.0
# A voter that makes no step for a minute, or in the time of four, while we are due and it is not, does not count: its
# training thread hangs, or evaluates for long.
HUNG_S, HUNG_STEPS = 60.0, 4
# A user is told that there are no rounds after this: a peer that is restarted at once comes back before.
TELL_AFTER_S = 5.0
# Peers that a line of the log names.
MOST_NAMED = 3


def _waits_s(patience_s: float) -> float:
    """How long voters that fell silent are waited for."""
    return max(QUORUM_LOST_S, patience_s)


class LineageWatch:
    """Measures since when a quorum of the head's voters was missing, and since when its lineage has ended.

    Attributes:
        hung: voters that are linked, but do not train.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.hung: frozenset[Voter] = frozenset()
        self._liveness = liveness
        self._steps: dict[PeerId, tuple[int, float]] = {}  # of voters, and since when they are there
        self._seen_s = 0.0
        self._ended_from_s: float | None = None
        self._told = False

    def reset(self, now: float) -> None:
        """Count from now: after a new head, or after this process was held up."""
        self._note_quorum(now)
        self.hung, self._steps = frozenset(), {}

    def _note_quorum(self, now: float) -> None:
        self._seen_s, self._ended_from_s, self._told = now, None, False

    def note_steps(self, head: Head, due: Collection[PeerId], now: float) -> None:
        """Notice which voters hang. Call it every second.

        Args:
            due: the peers that are due for the round after the head. If we are not among them, nobody counts as hung.
        """
        own, before, self._steps = self._liveness.own[0], self._steps, {}
        if own not in due:
            self.hung = frozenset()
            return
        beats, hung = self._liveness.beats(), list[Voter]()
        for voter in head.voters:
            if voter[0] in due or (beat := beats.get(voter[0])) is None:
                continue
            step, since_s = before.get(voter[0], (-1, now))
            self._steps[voter[0]] = beat.step, since_s if step == beat.step else now
            if now - self._steps[voter[0]][1] >= max(HUNG_S, HUNG_STEPS / beat.speed if beat.speed > 0 else 0.0):
                hung.append(voter)
        self.hung = frozenset(hung)

    def has_ended(self, head: Head) -> bool:
        """Whether the voters of this head are gone for good."""
        liveness = self._liveness
        return lineage.has_ended(
            head.voters, liveness.present(), lambda voter: liveness.is_gone_for_good(voter, head.lineage)
        )

    def why(self, head: Head, now: float) -> str:
        """Why the head's lineage does not go on, for the log."""
        missing = self._missing(head)
        if self.has_ended(head):
            return f"{missing} left, was restarted, or went on without us"
        return f"no word from {missing} for {now - self._seen_s:.0f} s"

    def tell(self, head: Head, patience_s: float, now: float) -> None:
        """Tell the user, once, that there are no rounds because voters are away. Call it after `is_our_turn`."""
        away_s = now - self._seen_s
        if self._told or away_s < TELL_AFTER_S:
            return
        self._told = True
        logger.info(
            "no rounds for now: too few of the peers that decide round %d are here and train (missing: %s); training "
            "goes on. If they do not come back within %.0f s, rounds go on without them",
            head.round + 1,
            self._missing(head),
            max(0.0, _waits_s(patience_s) - away_s),
        )

    def _missing(self, head: Head) -> str:
        present = self._here()
        missing = [
            shown(peer_id) if peer_id != self._liveness.own[0] else "this peer before its restart"
            for peer_id, incarnation in head.voters
            if (peer_id, incarnation) not in present
        ]
        more = f" and {len(missing) - MOST_NAMED} others" if len(missing) > MOST_NAMED else ""
        return ", ".join(missing[:MOST_NAMED]) + more

    def given_up(self, patience_s: float, now: float) -> frozenset[Voter]:
        """The voters that hang, if a quorum has been missing for as long as it is waited for; else none."""
        return self.hung if now - self._seen_s > _waits_s(patience_s) else frozenset()

    def _here(self) -> set[Voter]:
        return self._liveness.present() - self.hung

    def sees_quorum(self, head: Head, now: float) -> bool:
        """Whether a quorum of the head's voters is here and trains. Call it every second, also while a round lands."""
        if is_seen := is_quorum(self._here(), head.voters):
            self._note_quorum(now)
        return is_seen

    def is_our_turn(
        self,
        head: Head,
        patience_s: float,
        now: float,
        *,
        awaits: Callable[[], bool],
        takes_turns: Callable[[PeerId], bool],
    ) -> bool:
        """Whether the voters are gone, and it is our turn to begin a new lineage; call it every second.

        Args:
            awaits: as for `lineage.is_our_turn`; asked only without a quorum.
            takes_turns: whether a peer may begin one.
        """
        if self.sees_quorum(head, now):
            return False
        if not self.has_ended(head):
            self._ended_from_s = None
        elif self._ended_from_s is None:
            self._ended_from_s = now
        me, here = self._liveness.own[0], (head.lineage, head.round)
        hung = {peer for peer, _ in self.hung}
        beats = self._liveness.beats().items()
        at_head = [peer for peer, beat in beats if (beat.lineage, beat.round) == here and peer not in hung]
        return lineage.is_our_turn(
            ended_s=None if self._ended_from_s is None else now - self._ended_from_s,
            lost_s=now - self._seen_s,
            patience_s=_waits_s(patience_s),
            lower=sum(peer < me and takes_turns(peer) for peer in at_head),
            awaits=awaits(),
        )
