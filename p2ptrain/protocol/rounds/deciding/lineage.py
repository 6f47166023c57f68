"""Who begins the next lineage when a quorum of the voters is gone, the id of a lineage, and the heads that we had."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.wire.messages import LINEAGE_PATTERN, MAX_COUNT, Beat, Head
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# Each peer waits this long for each linked one with a lower id (guess; three heartbeats of a small swarm), but for so
# many at most, and for an answer about a claimed state at most this long: claims cost nothing.
TURN_S, MAX_TURNS, ANSWER_S = 3.0, 3, 10.0
# The same turn where missing voters may come back: other peers may have lost them later (guess).
LOST_TURN_S = 60.0
# Changes of the head that are remembered, other than to the next round, in at most 35 MB (computed). A peer whose line
# fails every hour has two in each outage, so this is for years. With more, only a restart helps.
MAX_JUMPS = 100_000
# Bounds the digits in a lineage's id. No run has so many lineages.
MAX_GENERATION = 999_999_999


class PastHeads:
    """The lineages and rounds of the heads that this incarnation had.

    With each head a peer forgets what it promised and accepted: back at an earlier head, it could vote twice.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, list[range]] = {}  # of each lineage, rounds in a row
        self._lineage: str | None = None
        self._jumps = 0

    def may_adopt(self, head: Head) -> bool:
        """Whether a head is none that we had, nor of an earlier round of our lineage."""
        if head.lineage == self._lineage and head.round < self._rounds[head.lineage][-1].stop:
            return False
        if self._jumps >= MAX_JUMPS and not self._is_next(head):
            return False
        return not any(head.round in rounds for rounds in self._rounds.get(head.lineage, ()))

    def note(self, head: Head) -> None:
        """This is our head now."""
        if self._is_next(head):
            first = self._rounds[head.lineage].pop().start
        else:
            first = head.round
            self._jumps += 1
        self._rounds.setdefault(head.lineage, []).append(range(first, head.round + 1))
        self._lineage = head.lineage

    def _is_next(self, head: Head) -> bool:
        return head.lineage == self._lineage and head.round == self._rounds[head.lineage][-1].stop


def has_ended(voters: Sequence[Voter], present: Collection[Voter], is_gone: Callable[[Voter], bool]) -> bool:
    """Whether no quorum of the voters is present, and none of the missing ones can come back."""
    return not is_quorum(present, voters) and all(is_gone(voter) for voter in voters if voter not in present)


def is_our_turn(*, ended_s: float | None, lost_s: float, patience_s: float, lower: int, awaits: bool) -> bool:
    """Whether this peer begins the lineage that follows its own, which has no quorum of its voters any more.

    Peers at one head take turns in the order of their ids. So of those that see each other, the first begins, and the
    others adopt what it began.

    Args:
        ended_s: seconds since `has_ended`; None if it has not.
        lost_s: seconds since a quorum was present.
        patience_s: how long missing voters are waited for that may come back.
        lower: linked peers at our head with a lower id. One that does nothing delays the others by a turn.
        awaits: whether a linked peer claims a state that this one may adopt instead, and has not answered yet. Peers
            that wait for the same voters run out of patience together, and the first of them begins a lineage.
    """
    turns = min(lower, MAX_TURNS)
    if lost_s > patience_s + turns * LOST_TURN_S + (ANSWER_S if awaits else 0.0):
        return True
    return ended_s is not None and ended_s >= turns * TURN_S and (not awaits or ended_s >= ANSWER_S)


def is_fresh(place: Head | Beat, run: RunConfig) -> bool:
    """Whether nothing was averaged yet at a place of a run. With pairwise steps, no place tells."""
    return place.round < 0 and not run.is_pairwise


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
    if head.round < 0 and (head.run_step, head.tokens_total) != (0, 0):
        raise WireError(f"a head before the first round, at step {head.run_step}, with {head.tokens_total} tokens")


def new_lineage(parent: str, round_: int, founder: PeerId, incarnation: str) -> str:
    """The id of a lineage: its generation, and a hash of its parent lineage (or the run digest), round and founder."""
    generation = min(generation_of(parent) + 1, MAX_GENERATION)
    return f"{generation}-{hashlib.sha256(f'{parent}/{round_}/{founder}/{incarnation}'.encode()).hexdigest()[:16]}"
