"""When a lineage has ended because its voters are gone, the id of the next one, and the heads that we had."""

from __future__ import annotations

import hashlib
import re

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.quorum import is_quorum
from p2ptrain.protocol.wire.messages import LINEAGE_PATTERN, MAX_COUNT, Head
from p2ptrain.protocol.wire.transport import PeerId

# A lineage ends after no quorum of its voters was reachable for this long, or for three intervals.
QUORUM_LOST_S = 60.0
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


class LineageWatch:
    """Measures the time since a quorum of the head's voters was reachable."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._seen_s = 0.0

    def reset(self, now: float) -> None:
        """Count from now: after a new head, or after this process was held up."""
        self._seen_s = now

    def has_ended(self, head: Head, three_intervals_s: float, now: float) -> bool:
        """Whether the voters are gone for good, and it is our turn, in the order of ids, to begin a new lineage."""
        voters, present, here = head.voters, self._liveness.present(), (head.lineage, head.round)
        if is_quorum(present, voters):
            self.reset(now)
            return False
        me, _ = self._liveness.own
        others = (peer for peer, beat in self._liveness.beats().items() if (beat.lineage, beat.round) == here)
        # One that has a lower id and does not begin a lineage delays the others by as long again.
        lower = sum(peer < me for peer in others)
        patience_s = (1 + lower) * max(QUORUM_LOST_S, three_intervals_s)
        missing = (voter for voter in voters if voter not in present)
        at_once = lower == 0 and all(map(self._liveness.is_gone_for_good, missing))
        return at_once or now - self._seen_s > patience_s


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
