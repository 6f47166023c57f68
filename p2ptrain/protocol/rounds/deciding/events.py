"""What `consensus.step` is a function of, and what it returns: a round's state at one peer, events, and effects.

The state has four parts: acceptor, member, proposer and outcome. An event comes in, effects go out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.wire.messages import Attempt, Commit, Head, Join, Message, Proposal, Record
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
    proposal: Proposal | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """Our participation in the attempt that we promised last. `held`: all parts of the proposal are here, verified."""

    attempt: Attempt
    deadline_s: float
    joined: bool = False
    planned: bool = False
    proposal: Proposal | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Proposer:
    """An attempt that we lead. `proposal` is None until sent; `gone` peers refused, withdrew or were lost.

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
    proposal: Proposal | None = None
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


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the consensus, of any round. Its signatures, views and voters are right.

    Raises WireError if it breaks a rule; the state is unchanged then.
    """

    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Lead:
    """Call `called`, which includes ourselves; ignored while we lead an attempt.

    Joins arrive within `window_s` + `grace_s`, the Commit within `attempt_s` after that. The attempt's counter is
    higher than `counter` and than all known ones.
    """

    called: tuple[PeerId, ...]
    window_s: float
    grace_s: float
    attempt_s: float
    counter: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """Answers `Prepare`. Consensus fills in the READY record of `join`."""

    attempt: Attempt
    join: Join


@dataclass(frozen=True, slots=True)
class Held:
    """Answers `Fetch`: all parts are here and verified."""

    attempt: Attempt
    record_sha256: str


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """We cannot continue as a member: an invalid record, a missing part, ..."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Averaged:
    """Answers `Average`."""

    attempt: Attempt
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class LeaderFailed:
    """Averaging failed, or we stop leading."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The link to a peer broke, or it left."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: at `deadline_s(state)`, or a few times a second."""


Event = Received | Lead | Prepared | Held | MemberFailed | Averaged | LeaderFailed | Lost | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; dropped if the peer is not linked."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to all linked peers of our lineage that hold its state."""

    message: Message


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take the snapshot within `window_s`, which is bounded, then `Prepared`."""

    attempt: Attempt
    window_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Check that the record fits the model, fetch its parts, then `Held` or `MemberFailed`."""

    attempt: Attempt
    record: Record


@dataclass(frozen=True, slots=True)
class Average:
    """A quorum promised, and no record is unfinished: plan and average, then `Averaged` or `LeaderFailed`."""

    attempt: Attempt
    joins: tuple[tuple[PeerId, Join], ...]


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """Stop taking part in this attempt, and in no other."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderEnded:
    """Our attempt ended without a record; the members have been told."""

    attempt: Attempt
    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Learned:
    """The round's outcome; our attempts end, without a `MemberEnded`. If it cannot be applied, replace the state."""

    commit: Commit


Effect = Send | Broadcast | Prepare | Fetch | Average | MemberEnded | LeaderEnded | Learned
