"""Every message that peers exchange, as frozen dataclasses.

The set and meaning of the fields are the protocol: `docs/protocol.md` tells it in words. How they travel is in
`packing`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

# --- a link's own ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of every stream. An empty digest is an observer's, who may only ask for settings and events."""

    run_id: str
    digest: str
    incarnation: str
    role: str
    maddrs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """Sent every second: shows life, measures the round trip, and says where the sender stands.

    `echo_s` is the `sent_s` of the last beat received from the other side and `held_s` how long ago that was. `reach`:
    how many voters of its head the sender is linked with, itself included.
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
    """Carries nothing: its frame's prefix acknowledges the bulk bytes received."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run on purpose."""

    reason: str


# --- gossip ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fragment:
    """Slots of the sender's weights (payload: its blocks, encoded). `age_s`: from gather to the wire."""

    lineage: str
    round: int
    selection: str
    cycle: int
    slot: int
    slot_count: int
    num_slots: int
    age_s: float


# --- rounds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """Proposal numbers of one round in their order: counter first, then the leader's id and incarnation.

    The incarnation keeps a leader that was started anew from using a number twice, for two records.
    """

    counter: int
    leader: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Contributor:
    """One whose outer gradient is in a round's mean; its weight is relative to the others of the record."""

    peer_id: str
    incarnation: str
    weight: float


@dataclass(frozen=True, slots=True)
class Part:
    """A slice [start, stop) of the blocks, and the blob of bytes that it is decoded from.

    What is in the blob, and who `reducer` is, depends on the run's averaging strategy: with "parts" the slice's encoded
    mean and who averaged it, with "gather" a contributor's outer gradient and the contributor.
    """

    start: int
    stop: int
    sha256: str
    reducer: str


@dataclass(frozen=True, slots=True)
class Record:
    """What a round decided; the hash of its packed form names it.

    `contributors` are in the order in which quorums count them. `parent_sha256` is the hash of the state (anchor and
    moments) that the round starts from, `intervals` each member's next H in inner steps. `cosine` is the average
    pairwise similarity of the outer gradients and `mean_norm` the norm of their mean; 0 where they are not known.
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
    """Where a lineage stands: its last resolved round and everything that the next one is decided with.

    `record` is None at genesis and after a new lineage began; then `voters` alone say who decides.
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
    """To all: the sender has done its inner steps. `counter` names the attempt that it expects next."""

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
    """A promise to refuse lower attempts, and what the leader needs to know to plan the round.

    `tokens` were trained on since the last inclusion, `shard_tokens` are there to be trained on (0: no shard).
    `at_length`: the sender has reached the run's length and wants the last, plain-average round.
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
    """Blocks [start, stop) of every member's outer gradient go to this reducer."""

    start: int
    stop: int
    reducer: str


@dataclass(frozen=True, slots=True)
class Roster:
    """The leader's plan of an attempt: who takes part, and who averages which slice."""

    lineage: str
    round: int
    attempt: Attempt
    members: tuple[str, ...]
    parts: tuple[RosterPart, ...]


@dataclass(frozen=True, slots=True)
class Contribution:
    """One chunk, blocks [start, stop), of the sender's encoded outer gradient (payload), for a reducer."""

    lineage: str
    round: int
    attempt: Attempt
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Reducer to leader: of these members everything has arrived, these others have stalled or gone."""

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
    """Reducer to leader: what it made of its part is served under these hashes.

    `gram` holds the inner products of the contributors' outer gradients in this part, row by row; empty when there are
    too many of them.
    """

    lineage: str
    round: int
    attempt: Attempt
    part: int
    sha256s: tuple[str, ...]
    gram: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Leader to members: fetch the parts of this record, store READY and say so."""

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
    """READY came from a quorum: the record is the round's outcome."""

    record: Record


@dataclass(frozen=True, slots=True)
class Abort:
    """The leader gives this attempt up."""

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
    """Answers Inquire: the record that the sender accepted in `attempt`; None: that it knows to be committed."""

    lineage: str
    round: int
    incarnation: str
    attempt: Attempt | None
    record_sha256: str


# --- requests and their answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for something; `subject` and `index` are told apart by `what` (see `requests.py`)."""

    request: int
    what: str
    subject: str
    index: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The payload answers a request; `found` False means that the sender has no such thing (now)."""

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
