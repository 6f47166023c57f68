"""Who begins the next lineage when a quorum of the voters is gone, the id of a lineage, and the heads that we had."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Sequence

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.proof import Voter, is_quorum
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.wire.messages import LINEAGE_PATTERN, MAX_COUNT, Head
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Voters that fell silent are waited for this long, or three intervals.
QUORUM_LOST_S = 60.0
# Each peer waits this long for each linked one with a lower id (guess; three heartbeats of a small swarm), but for so
# many at most, and for an answer about a claimed state at most this long: claims cost nothing.
TURN_S, MAX_TURNS, ANSWER_S = 3.0, 3, 10.0
# A user is told that there are no rounds after this: a peer that is restarted at once comes back before.
TELL_AFTER_S = 5.0
# Peers that a line of the log names.
MOST_NAMED = 3
# Changes of the head that are remembered, other than to the next round. A run has a few. With more, only a restart
# helps.
MAX_JUMPS = 1000
# Bounds the digits in a lineage's id. No run has so many lineages.
MAX_GENERATION = 999_999_999


class PastHeads:
    """The lineages and rounds of the heads that this incarnation had, in order.

    What it promised and accepted is forgotten with each head: at the same round it would vote a second time.
    """

    def __init__(self) -> None:
        self._heads: list[tuple[str, range]] = []  # rounds in a row

    def may_adopt(self, head: Head) -> bool:
        """Whether a head is none that we had, nor of an earlier round of our lineage."""
        lineage, rounds = self._heads[-1] if self._heads else ("", range(0))
        if head.lineage == lineage and head.round < rounds.stop:
            return False
        if len(self._heads) >= MAX_JUMPS and (head.lineage, head.round) != (lineage, rounds.stop):
            return False
        return not any(head.lineage == lineage and head.round in rounds for lineage, rounds in self._heads)

    def note(self, head: Head) -> None:
        """This is our head now."""
        first = head.round
        if self._heads and (self._heads[-1][0], self._heads[-1][1].stop) == (head.lineage, head.round):
            first = self._heads.pop()[1].start
        self._heads.append((head.lineage, range(first, head.round + 1)))


def has_ended(voters: Sequence[Voter], present: Collection[Voter], is_gone: Callable[[Voter], bool]) -> bool:
    """Whether no quorum of the voters is present, and none of the missing ones can come back."""
    return not is_quorum(present, voters) and all(is_gone(voter) for voter in voters if voter not in present)


def is_our_turn(*, ended_s: float | None, lost_s: float, patience_s: float, lower: int, awaits: bool) -> bool:
    """Whether this peer begins the lineage that follows its own, which has no quorum of its voters any more.

    Peers at one head take turns in the order of their ids, so that of those that see each other one begins, and the
    others adopt what it began.

    Args:
        ended_s: seconds since `has_ended`; None if it has not.
        lost_s: seconds since a quorum was present.
        patience_s: how long missing voters are waited for that may come back.
        lower: linked peers at our head with a lower id. One that does nothing delays the others by a turn.
        awaits: whether a linked peer claims a state that this one may adopt instead, and has not answered yet.
    """
    turns = min(lower, MAX_TURNS)
    if lost_s > (1 + turns) * patience_s:
        return True
    return ended_s is not None and ended_s >= turns * TURN_S and (not awaits or ended_s >= ANSWER_S)


class LineageWatch:
    """Measures since when a quorum of the head's voters was missing, and since when its lineage has ended."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._seen_s = 0.0
        self._ended_from_s: float | None = None
        self._told = False

    def reset(self, now: float) -> None:
        """Count from now: after a new head, or after this process was held up."""
        self._seen_s, self._ended_from_s, self._told = now, None, False

    def has_ended(self, head: Head) -> bool:
        """Whether the voters of this head are gone for good."""
        liveness = self._liveness
        return has_ended(head.voters, liveness.present(), lambda voter: liveness.is_gone_for_good(voter, head.lineage))

    def why(self, head: Head, now: float) -> str:
        """Why the head's lineage does not go on, for the log."""
        missing = self._missing(head)
        if self.has_ended(head):
            return f"{missing} left, was restarted, or went on without us"
        return f"no word from {missing} for {now - self._seen_s:.0f} s"

    def tell(self, head: Head, three_intervals_s: float, now: float) -> None:
        """Tell the user, once, that there are no rounds because voters are away. Call it after `is_our_turn`."""
        away_s = now - self._seen_s
        if self._told or away_s < TELL_AFTER_S:
            return
        self._told = True
        logger.info(
            "no rounds for now: too few of the peers that decide round %d can be reached (missing: %s); training goes "
            "on. If they do not come back within %.0f s, rounds go on without them",
            head.round + 1,
            self._missing(head),
            max(QUORUM_LOST_S, three_intervals_s) - away_s,
        )

    def _missing(self, head: Head) -> str:
        present = self._liveness.present()
        missing = [shown(peer_id) for peer_id, incarnation in head.voters if (peer_id, incarnation) not in present]
        more = f" and {len(missing) - MOST_NAMED} others" if len(missing) > MOST_NAMED else ""
        return ", ".join(missing[:MOST_NAMED]) + more

    def is_our_turn(
        self,
        head: Head,
        three_intervals_s: float,
        now: float,
        *,
        awaits: Callable[[], bool],
        takes_turns: Callable[[PeerId], bool],
    ) -> bool:
        """Whether the voters are gone, and it is our turn to begin a new lineage; call it every second.

        Args:
            awaits: as above; asked only without a quorum.
            takes_turns: whether a peer may begin one.
        """
        if is_quorum(self._liveness.present(), head.voters):
            self.reset(now)
            return False
        if not self.has_ended(head):
            self._ended_from_s = None
        elif self._ended_from_s is None:
            self._ended_from_s = now
        me, here = self._liveness.own[0], (head.lineage, head.round)
        at_head = [peer for peer, beat in self._liveness.beats().items() if (beat.lineage, beat.round) == here]
        return is_our_turn(
            ended_s=None if self._ended_from_s is None else now - self._ended_from_s,
            lost_s=now - self._seen_s,
            patience_s=max(QUORUM_LOST_S, three_intervals_s),
            lower=sum(peer < me and takes_turns(peer) for peer in at_head),
            awaits=awaits(),
        )


def generation_of(lineage: str) -> int:
    """The generation in the id of a lineage; -1 if it is no such id."""
    match = re.fullmatch(LINEAGE_PATTERN, lineage)
    return int(match[1]) if match else -1


def check_head(head: Head) -> None:
    """Raises WireError unless a lineage can have this head: its ids and counts."""
    if generation_of(head.genesis) < 0 or generation_of(head.lineage) < 0:
        raise WireError(f"a head of lineage {head.lineage[:40]!r} from genesis {head.genesis[:40]!r}")
    if not all(0 <= count <= MAX_COUNT for count in (head.round + 1, head.run_step, head.tokens_total)):
        raise WireError(f"a head at round {head.round}, step {head.run_step} of the run, {head.tokens_total} tokens")


def new_lineage(parent: str, round_: int, founder: PeerId, incarnation: str) -> str:
    """The id of a lineage: its generation, and a hash of its parent lineage (or the run digest), round and founder."""
    generation = min(generation_of(parent) + 1, MAX_GENERATION)
    return f"{generation}-{hashlib.sha256(f'{parent}/{round_}/{founder}/{incarnation}'.encode()).hexdigest()[:16]}"
