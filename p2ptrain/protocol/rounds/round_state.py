"""The consensus state of one round at one peer: acceptor, member, proposer and outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2ptrain.protocol.rounds.proof import Voter
from p2ptrain.protocol.wire.messages import Attempt, Commit, Head, Join, Record
from p2ptrain.protocol.wire.transport import PeerId

# Lower than every real attempt.
NO_ATTEMPT = Attempt(-1, "", "")
# Calls whose counter is further ahead of all known ones are refused. Honest peers are a few apart (guess).
MAX_COUNTERS_AHEAD = 1000
# Records remembered that could not be had. Honest rounds have none or a few (guess).
MAX_UNHELD = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on an attempt of another leader, in seconds.

    Attributes:
        window_s: the longest joining window.
        grace_s: from the end of the window to the Roster or Propose.
        attempt_s: from the Roster, and again from the Propose, to the end.
    """

    window_s: float
    grace_s: float
    attempt_s: float


@dataclass(frozen=True, slots=True)
class Acceptor:
    """What we promised and accepted in this round. It must outlive attempts, for safety."""

    promised: Attempt = NO_ATTEMPT
    attempt: Attempt | None = None
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """Our participation in the attempt that we promised last. `held`: all parts of the proposal are here, verified."""

    attempt: Attempt
    deadline_s: float
    joined: bool = False
    planned: bool = False
    proposal: Record | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Proposer:
    """An attempt that we lead. `record` is None until proposed; `gone` peers refused, withdrew or were lost.

    `ready` has the signatures of the voters that are READY.
    """

    attempt: Attempt
    called: tuple[PeerId, ...]
    window_s: float
    attempt_s: float
    deadline_s: float
    joining: bool = True
    joins: tuple[tuple[PeerId, Join], ...] = ()
    gone: frozenset[PeerId] = frozenset()
    record: Record | None = None
    ready: tuple[tuple[Voter, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The state of the round after `head`; it begins with the first four fields alone.

    `learned` is the round's outcome. Calls may exceed `highest`, the highest known counter, by `ahead`.
    `unheld` has the hashes of proposed records whose parts were unavailable here, `doubted` the peers that reported
    such a record as their READY one to an attempt of ours.
    """

    peer: PeerId
    incarnation: str
    head: Head
    limits: Limits
    acceptor: Acceptor = Acceptor()
    member: Member | None = None
    proposer: Proposer | None = None
    learned: Commit | None = None
    highest: int = 0
    ahead: int = MAX_COUNTERS_AHEAD
    unheld: frozenset[str] = frozenset()
    doubted: frozenset[PeerId] = frozenset()

    @property
    def round(self) -> int:
        return self.head.round + 1


def deadline_s(state: State) -> float:
    """When the next `Tick` is needed; infinite if never."""
    deadlines = [part.deadline_s for part in (state.member, state.proposer) if part is not None]
    return min(deadlines, default=math.inf)
