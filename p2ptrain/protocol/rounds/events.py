"""What goes into the consensus of a round and what comes out: its events and its effects.

How they are used is in `consensus`. Events, and what the driver owes for each:

- `Received(sender, message)`: every Call, Join, Refuse, Roster, Propose, Ready, Commit, Abort, Withdraw, Inquire and
  Accepted, of any round. `sender` is the identity of the link. A record that was asked for because others are further
  (a `record` request) comes as a Commit. Raises WireError where the message breaks a rule; the state stays as it was.
- `Lead(called, ...)`: it is our turn: call these peers, ourselves among them. Ignored while an attempt of ours is
  under way.
- `Prepared(attempt, join)`: answers `Prepare`. Of `join` consensus fills in the READY record.
- `Held(attempt, record_sha256)`: answers `Fetch`: all parts are here and verified.
- `MemberFailed(attempt, reason)`: as a member we cannot go on: no record that we can step by, a part not to be had, ...
- `Averaged(attempt, record)`: answers `Average`.
- `LeaderFailed(attempt, reason)`: averaging came to nothing, or we do not want to lead on.
- `Lost(peer)`: the link to a peer broke, or it said that it leaves.
- `Tick()`: at `deadline_s(state)`, or a few times a second.

Effects:

- `Send(to, message)`; lost when the peer is not linked. `Broadcast(message)`: to all live trainers but ourselves.
- `Prepare(attempt, window_s)`: take the snapshot within `window_s`, which is bounded, then `Prepared`.
- `Fetch(attempt, record)`: check that the record fits the model, fetch its parts, then `Held` or `MemberFailed`.
- `Average(attempt, joins)`: a quorum promised and no record is unfinished: plan and average with these, then `Averaged`
  or `LeaderFailed`. Where a record is unfinished consensus proposes it by itself, and the driver sees no `Average`.
- `MemberEnded(attempt, reason)`: stop taking part in this attempt, and in no other.
- `LeaderEnded(attempt, reason, timed_out)`: our own attempt is over without a record; the members have been told.
- `Learned(record)`: this is the round's outcome. Whatever we took part in ends, without a `MemberEnded`; from now on
  only Inquire is answered. Fetch the record's parts if they are not here; where that fails, replace the whole state.
- `Unproven(record)`: somebody says that this was committed, and no quorum of voters could be asked: we cannot follow by
  records, replace the whole state.
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
    """Call `called`, who have `window_s` to join and `grace_s` more for the way; then `attempt_s` to the Commit.

    The attempt's counter is higher than `counter` and than all that we know.
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
