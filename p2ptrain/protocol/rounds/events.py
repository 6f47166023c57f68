"""The events (inputs) and effects (outputs) of `consensus`."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.protocol.wire.messages import Attempt, Commit, Join, Message, Record
from p2ptrain.protocol.wire.transport import PeerId


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the consensus, of any round. The signatures of a Ready or Commit are right.

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
    record: Record


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
    """Send a message to all live trainers except ourselves."""

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
