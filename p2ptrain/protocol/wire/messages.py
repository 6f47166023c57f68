"""All messages between peers. `docs/protocol.md` describes them, `serialization` encodes them."""

from __future__ import annotations

import typing
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of every stream. Observers send an empty digest and may only request settings and events."""

    run_id: str
    digest: str
    incarnation: str
    role: str
    maddrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent every second: a heartbeat with the sender's position, which also measures the round trip.

    `echo_s` is the `sent_s` of the last beat received from the other side and `held_s` how long ago that was. `reach`
    is the number of voters of its head that the sender is linked with, including itself.
    """

    sent_s: float
    echo_s: float
    held_s: float
    genesis: str
    lineage: str
    round: int
    tokens_total: int
    step: int
    status: str
    speed: float
    members: tuple[tuple[str, tuple[str, ...]], ...]
    reach: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Has no fields: its frame's prefix acknowledges the bulk bytes received."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run on purpose."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """Slots of the sender's weights (payload: their blocks, encoded). `age_s`: seconds from gathering to sending."""

    lineage: str
    round: int
    selection: str
    cycle: int
    slot: int
    slot_count: int
    num_slots: int
    age_s: float


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """A proposal number; ordered by counter, then by the leader's id and incarnation.

    The incarnation prevents a restarted leader from using one number for two records.
    """

    counter: int
    leader: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Contributor:
    """A peer whose outer gradient is in a round's mean. `weight` is relative to the record's other contributors."""

    peer_id: str
    incarnation: str
    weight: float


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks [start, stop), and the hash of the blob that they are decoded from.

    With the averaging strategy "parts" the blob is the encoded mean of these blocks; with "gather" it is one
    contributor's outer gradient. `holder` has made it, and keeps it the longest.
    """

    start: int
    stop: int
    sha256: str
    holder: str


@dataclass(frozen=True, slots=True)
class Record:
    """The decision of a round, named by the hash of its packed form.

    The order of `contributors` matters for quorums. `parent_sha256` is the hash of the state (anchor and moments) that
    the round starts from, `intervals` each member's next H in inner steps. `cosine` is the average pairwise similarity
    of the outer gradients, `mean_norm` the norm of their mean; 0 if unknown.
    """

    genesis: str
    lineage: str
    round: int
    parent_sha256: str
    contributors: tuple[Contributor, ...]
    parts: tuple[Part, ...]
    outer_optimizer: str
    outer_lr: float
    outer_momentum: float
    run_step: int
    tokens_total: int
    intervals: tuple[tuple[str, int], ...]
    cosine: float
    mean_norm: float


@dataclass(frozen=True, slots=True)
class Head:
    """The last resolved round of a lineage, and what is needed to decide the next one.

    `record` is the last committed one, None at genesis; after a new lineage began it is still that of the lineage
    before. `voters` decide the next.
    """

    genesis: str
    lineage: str
    round: int
    state_sha256: str
    anchor_sha256: str
    voters: tuple[tuple[str, str], ...]
    run_step: int
    tokens_total: int
    record: Record | None


@dataclass(frozen=True, slots=True)
class Due:
    """To all peers: the sender has done its inner steps. `counter` is that of the attempt it expects next."""

    lineage: str
    round: int
    counter: int


@dataclass(frozen=True, slots=True)
class Call:
    """From a leader to every live peer: join this attempt within the window."""

    lineage: str
    round: int
    attempt: Attempt
    window_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """A promise to refuse lower attempts, and what the leader needs to plan the round.

    `tokens`: trained on since the sender's last inclusion; `shard_tokens`: the size of its shard (0: none).
    `at_length`: the sender has reached the run's length and asks for the last, plain-average round.
    """

    lineage: str
    round: int
    attempt: Attempt
    incarnation: str
    state_sha256: str
    has_snapshot: bool
    tokens: int
    shard_tokens: int
    run_step: int
    speed: float
    rate: float
    linked: tuple[str, ...]
    at_length: bool
    ready_attempt: Attempt | None
    ready: Record | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The receiver's attempt is below the sender's promise."""

    lineage: str
    round: int
    attempt: Attempt
    promised: Attempt


@dataclass(frozen=True, slots=True)
class RosterPart:
    """Blocks [start, stop) of the senders' outer gradients go to this reducer. Empty `senders`: all members."""

    start: int
    stop: int
    reducer: str
    senders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Roster:
    """The leader's plan of an attempt: its members, and who sends which blocks to whom."""

    lineage: str
    round: int
    attempt: Attempt
    members: tuple[str, ...]
    parts: tuple[RosterPart, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """To a reducer: blocks [start, stop) of the sender's encoded outer gradient (payload)."""

    lineage: str
    round: int
    attempt: Attempt
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Reducer to leader: the members whose chunks are complete, and those that stalled or were lost."""

    lineage: str
    round: int
    attempt: Attempt
    part: int
    complete: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Leader to reducers: average exactly these contributors."""

    lineage: str
    round: int
    attempt: Attempt
    contributors: tuple[Contributor, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """Reducer to leader: the hashes of the blobs that it now serves for its part.

    `gram` holds the inner products of the contributors' outer gradients in this part, row by row; empty when there are
    too many contributors.
    """

    lineage: str
    round: int
    attempt: Attempt
    part: int
    sha256s: tuple[str, ...]
    gram: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Leader to members: fetch the parts of this record, store it as READY, and reply with Ready."""

    attempt: Attempt
    record: Record


@dataclass(frozen=True, slots=True)
class Ready:
    """Member to leader: it holds all parts of the record and has stored READY."""

    lineage: str
    round: int
    attempt: Attempt
    incarnation: str
    record_sha256: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A quorum is READY: the record is the round's outcome."""

    record: Record


@dataclass(frozen=True, slots=True)
class Abort:
    """The leader ends this attempt."""

    lineage: str
    round: int
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Member to leader: it cannot go on with this attempt."""

    lineage: str
    round: int
    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Inquire:
    """To a voter: which record of this round has it accepted or committed? There is no answer when it has none."""

    lineage: str
    round: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answers Inquire: the record that the sender accepted in `attempt`, or (None) knows to be committed."""

    lineage: str
    round: int
    incarnation: str
    attempt: Attempt | None
    record_sha256: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request; `docs/protocol.md` lists each `what` with its `subject` and `index`."""

    request: int
    what: str
    subject: str
    index: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The payload answers a request; `found` is False if the sender does not have it now."""

    request: int
    found: bool
    note: str


Message = (
    Hello | Beat | Ack | Leave | Fragment | Due | Call | Join | Refuse | Roster | Contribution | Arrived | Reduce
    | Reduced | Propose | Ready | Commit | Abort | Withdraw | Request | Answer | Inquire | Accepted
)  # fmt: skip

# The numbers on the wire: add at the end, never reorder.
KINDS: dict[int, type[Message]] = dict(enumerate(typing.get_args(Message), start=1))
KIND_OF: dict[type[Message], int] = {cls: kind for kind, cls in KINDS.items()}
