"""The events (inputs) and effects (outputs) of `consensus`.

Events, and when the driver passes them:

- `Received(sender, message)`: every Call, Join, Refuse, Roster, Propose, Ready, Commit, Abort, Withdraw, Inquire and
  Accepted, of any round. `sender` is the identity of the link. The answer to a `record` request comes as a Commit.
  Raises WireError if the message breaks a rule; the state is unchanged then.
- `Lead(called, ...)`: call these peers, including ourselves. Ignored while we lead an attempt.
- `Prepared(attempt, join)`: answers `Prepare`. Consensus fills in the READY record of `join`.
- `Held(attempt, record_sha256)`: answers `Fetch`: all parts are here and verified.
- `MemberFailed(attempt, reason)`: we cannot continue as a member: an invalid record, a missing part, ...
- `Averaged(attempt, record)`: answers `Average`.
- `LeaderFailed(attempt, reason)`: averaging failed, or we stop leading.
- `Lost(peer)`: the link to a peer broke, or it left.
- `Tick()`: at `deadline_s(state)`, or a few times a second.

Effects:

- `Send(to, message)`; dropped if the peer is not linked. `Broadcast(message)`: to all live trainers except ourselves.
- `Prepare(attempt, window_s)`: take the snapshot within `window_s`, which is bounded, then `Prepared`.
- `Fetch(attempt, record)`: check that the record fits the model, fetch its parts, then `Held` or `MemberFailed`.
- `Average(attempt, joins)`: a quorum promised and no record is unfinished: plan and average with these, then `Averaged`
  or `LeaderFailed`. An unfinished record is proposed by consensus itself, without `Average`.
- `MemberEnded(attempt, reason)`: stop taking part in this attempt, and in no other.
- `LeaderEnded(attempt, reason, timed_out)`: our attempt ended without a record; the members have been told.
- `Learned(record)`: the round's outcome. Our attempts end, without a `MemberEnded`; from now on only Inquire is
  answered. Fetch the record's parts if they are missing; if that fails, replace the whole state.
- `Unproven(record)`: a peer sent this as committed, and no quorum of voters confirmed it: replace the whole state.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.protocol.wire.messages import Attempt, Join, Message, Record
from p2ptrain.protocol.wire.transport import PeerId


@dataclass(frozen=True, slots=True)
class Received:
    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Lead:
    """Call `called`. Joins arrive within `window_s` + `grace_s`, the Commit within `attempt_s` after that.

    The attempt's counter is higher than `counter` and than all known ones.
    """

    called: tuple[PeerId, ...]
    window_s: float
    grace_s: float
    attempt_s: float
    counter: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    attempt: Attempt
    join: Join


@dataclass(frozen=True, slots=True)
class Held:
    attempt: Attempt
    record_sha256: str


@dataclass(frozen=True, slots=True)
class MemberFailed:
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Averaged:
    attempt: Attempt
    record: Record


@dataclass(frozen=True, slots=True)
class LeaderFailed:
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Received | Lead | Prepared | Held | MemberFailed | Averaged | LeaderFailed | Lost | Tick


@dataclass(frozen=True, slots=True)
class Send:
    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    message: Message


@dataclass(frozen=True, slots=True)
class Prepare:
    attempt: Attempt
    window_s: float


@dataclass(frozen=True, slots=True)
class Fetch:
    attempt: Attempt
    record: Record


@dataclass(frozen=True, slots=True)
class Average:
    attempt: Attempt
    joins: tuple[tuple[PeerId, Join], ...]


@dataclass(frozen=True, slots=True)
class MemberEnded:
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderEnded:
    attempt: Attempt
    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Learned:
    record: Record


@dataclass(frozen=True, slots=True)
class Unproven:
    record: Record


Effect = Send | Broadcast | Prepare | Fetch | Average | MemberEnded | LeaderEnded | Learned | Unproven
