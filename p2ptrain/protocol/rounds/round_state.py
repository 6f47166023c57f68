"""What one peer knows of one round, for the consensus: as acceptor, as member, as proposer, and as learner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from p2ptrain.protocol.rounds.learner import NOTHING_HEARD, Learner
from p2ptrain.protocol.rounds.quorum import Voter
from p2ptrain.protocol.wire.messages import Attempt, Head, Join, Record
from p2ptrain.protocol.wire.transport import PeerId

# Lower than every real attempt.
NO_ATTEMPT = Attempt(-1, "", "")
# A counter is believed when it is at most so much higher than all that we know. Honest peers are a few apart (guess).
MAX_COUNTERS_AHEAD = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a leader may keep us, whatever it says, in seconds.

    Attributes:
        window_s: the longest joining window that is granted.
        grace_s: from the end of the window to its Roster or Propose.
        attempt_s: from its Roster, and once more from its Propose, to its last word.
    """

    window_s: float
    grace_s: float
    attempt_s: float


@dataclass(frozen=True, slots=True)
class Acceptor:
    """What we promised and accepted in this round. Outlives attempts; a voter's safety rests on it."""

    promised: Attempt = NO_ATTEMPT
    attempt: Attempt | None = None
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """Our part in the attempt that we promised last."""

    attempt: Attempt
    deadline_s: float
    joined: bool = False
    planned: bool = False
    proposal: Record | None = None


@dataclass(frozen=True, slots=True)
class Proposer:
    """An attempt that we lead. `record` is None until it is proposed; `gone` cannot follow the attempt any more."""

    attempt: Attempt
    called: tuple[PeerId, ...]
    window_s: float
    attempt_s: float
    deadline_s: float
    joining: bool = True
    joins: tuple[tuple[PeerId, Join], ...] = ()
    gone: frozenset[PeerId] = frozenset()
    record: Record | None = None
    ready: frozenset[Voter] = frozenset()


@dataclass(frozen=True, slots=True)
class State:
    """Everything that one peer knows of one round. `head` is what it starts from, `highest` a counter."""

    peer: PeerId
    incarnation: str
    head: Head
    limits: Limits
    acceptor: Acceptor = Acceptor()
    member: Member | None = None
    proposer: Proposer | None = None
    learner: Learner = NOTHING_HEARD
    highest: int = 0
    ahead: int = MAX_COUNTERS_AHEAD

    @property
    def round(self) -> int:
        return self.head.round + 1


def begin(peer: PeerId, incarnation: str, head: Head, limits: Limits) -> State:
    """The state in which the round after `head` begins."""
    return State(peer, incarnation, head, limits)


def restarted(state: State) -> State:
    """What must survive when a peer's protocol is built anew and keeps its incarnation: all but what was under way."""
    learner = Learner(record=state.learner.record)
    return dataclasses.replace(state, member=None, proposer=None, learner=learner)


def deadline_s(state: State) -> float:
    """When `Tick` will have something to do, unless something else happens before; infinite if never."""
    deadlines = [part.deadline_s for part in (state.member, state.proposer) if part is not None]
    return min([*deadlines, state.learner.ask_again_s])
