"""All messages between peers, and their bytes. `docs/understand/protocol.md` describes them.

A message is packed as the msgpack list of its fields. Unpacking checks the number, types and sizes of all fields, and
refuses floats that are not finite, and identifiers with control characters; in free texts these are escaped.
"""

from __future__ import annotations

import hashlib
import sys
import typing
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from p2ptrain.algorithms.merkle import HASH_BYTES, MAX_PROOF
from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.text import SAFE_PATTERN, shown

T = TypeVar("T")
MAX_STRING = 4096
MAX_LIST = 4096
# Addresses of a peer.
MAX_MADDRS = 16
MAX_MADDR_LENGTH = 512  # a relayed one with two peer ids has 150 characters
MAX_REASON = 512
# Of a message that does not fit its schema, in the error: what is decoded, and what is shown of it.
MAX_SHOWN_BYTES, MAX_SHOWN_CHARS = 4096, 80
# The first contributors of a round decide the next: bounds the leader's wait in large swarms (guess).
MAX_VOTERS = 31
# A public key and a signature made with it; with an RSA key of 4096 bits, these have 1,070 bytes.
MAX_SIGNATURE_BYTES = 2048
# How a bulk connection is opened.
MAX_OFFER_BYTES = 1024
# Of a heartbeat. We name two members; more are accepted, so that later versions may.
MAX_BEAT_MEMBERS = 4
# The longest status that we make has 60 characters.
MAX_STATUS = 256
MAX_PEER_ID = 128
# Voters that a heartbeat counts at most; more than `MAX_VOTERS`, so that later versions may have more.
MAX_REACH = 64
# No peer makes a step in less than a microsecond.
MAX_SPEED = 1e6
# More than any run reaches.
MAX_COUNT = 2**62
# The id of a lineage: its generation and a hash.
LINEAGE_PATTERN = "([0-9]{1,9})-[0-9A-Za-z]{1,64}"

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Float = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
# An identifier or address: refused if it has control characters.
Text = Annotated[str, Meta(max_length=MAX_STRING, pattern=SAFE_PATTERN)]
# Free text for people: a struct escapes it in its `__post_init__`, which msgspec also calls when it decodes.
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Prose = Annotated[str, Meta(max_length=MAX_STRING)]
# A peer's id, its incarnation, the name of a lineage, a hash in hex.
Name = Annotated[str, Meta(max_length=MAX_PEER_ID, pattern=SAFE_PATTERN)]
Items = Annotated[tuple[T, ...], Meta(max_length=MAX_LIST)]
Voters = Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_VOTERS)]
Mac = Annotated[bytes, Meta(max_length=32)]
Maddr = Annotated[str, Meta(max_length=MAX_MADDR_LENGTH, pattern=SAFE_PATTERN)]
Maddrs = Annotated[tuple[Maddr, ...], Meta(max_length=MAX_MADDRS)]
Signature = Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)]
# A hash of 32 bytes, or empty where there is none.
Hash = Annotated[bytes, Meta(max_length=HASH_BYTES)]
# A port and a self-signed certificate of 200 bytes.
Offer = Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]
MerkleProof = Annotated[tuple[Hash, ...], Meta(max_length=MAX_PROOF)]
# On the sender's clock, or a duration.
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
# Empty: none yet.
Lineage = Annotated[str, Meta(pattern=rf"\A({LINEAGE_PATTERN})?\Z")]
Member = tuple[Name, Maddrs]


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Packed as a list of the fields in their order."""


def _escape(message: msgspec.Struct, name: str, most: int) -> None:
    """Escape a free text of a message that is being made, and cut it to its limit."""
    msgspec.structs.force_setattr(message, name, shown(getattr(message, name), most))


class Hello(_Struct, frozen=True):
    """First frame of every stream of an open run, and in a closed one the first after the proofs.

    Observers send an empty digest and may only request settings and events. `bulk` is the offer of a `BulkTransport`,
    empty without one.
    """

    run_id: Text
    digest: Text
    incarnation: Text
    role: Text
    maddrs: Maddrs
    bulk: Offer


class Challenge(_Struct, frozen=True):
    """First frame of every stream of a closed run, from both sides: asks the other to prove that it has the run key.

    The dialler's `proof` is empty, the acceptor's answers the dialler's nonce.
    """

    nonce: Mac
    proof: Mac


class Proof(_Struct, frozen=True):
    """Dialler to acceptor: answers the acceptor's nonce."""

    proof: Mac


class Beat(_Struct, frozen=True):
    """Sent every second: a heartbeat with the sender's position, which also measures the round trip.

    `echo_s` is the `sent_s` of the last beat received from the other side and `held_s` how long ago that was. `reach`
    is the number of voters of its head that the sender is linked with, including itself.
    """

    sent_s: Seconds
    echo_s: Seconds
    held_s: Seconds
    genesis: Lineage
    lineage: Lineage
    round: Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
    tokens_total: Count
    step: Count
    status: Annotated[str, Meta(max_length=MAX_STATUS)]
    speed: Annotated[float, Meta(ge=0, le=MAX_SPEED)]
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_BEAT_MEMBERS)]
    reach: Annotated[int, Meta(ge=0, le=MAX_REACH)]

    def __post_init__(self) -> None:
        _escape(self, "status", MAX_STATUS)


class Ack(_Struct, frozen=True):
    """Has no fields: its frame's prefix acknowledges the bulk bytes received."""


class Leave(_Struct, frozen=True):
    """The sender leaves the run on purpose."""

    reason: Prose

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_STRING)


class Fragment(_Struct, frozen=True):
    """Slots of the sender's weights (payload: their blocks, encoded). `age_s`: seconds from gathering to sending."""

    lineage: Text
    round: Int
    selection: Text
    cycle: Int
    slot: Int
    slot_count: Int
    num_slots: Int
    age_s: Float


class Attempt(_Struct, frozen=True, order=True):
    """A proposal number; ordered by counter, then by the leader's id and incarnation.

    The incarnation prevents a restarted leader from using one number for two records.
    """

    counter: Int
    leader: Name
    incarnation: Name


class Contributor(_Struct, frozen=True):
    """A peer whose outer gradient is in a round's mean. `weight` is relative to the record's other contributors.

    `root` is the Merkle root of its encoded chunks; empty if the run has no audits.
    """

    peer_id: Name
    incarnation: Name
    weight: Float
    root: Hash


class Part(_Struct, frozen=True):
    """Blocks [start, stop), and the hash of the blob that they are decoded from.

    With the averaging strategy "parts" the blob is the encoded mean of these blocks; with "gather" it is one
    contributor's outer gradient. `holder` has made it, and keeps it the longest.
    """

    start: Int
    stop: Int
    digest: Name
    holder: Name


class Record(_Struct, frozen=True, dict=True):
    """The decision of a round, named by the hash of its packed form.

    The order of `contributors` matters for quorums. `parent_hash` is the hash of the state (anchor and moments) that
    the round starts from, `intervals` each member's next H in inner steps. `cosine` is the average pairwise similarity
    of the outer gradients, `mean_norm` the norm of their mean; 0 if unknown.
    """

    genesis: Name
    lineage: Name
    round: Int
    parent_hash: Name
    contributors: Items[Contributor]
    parts: Items[Part]
    outer_optimizer: Name
    outer_lr: Float
    outer_momentum: Float
    run_step: Int
    tokens_total: Int
    intervals: Items[tuple[Name, Int]]
    cosine: Float
    mean_norm: Float

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(pack(self)).hexdigest()


class Vote(_Struct, frozen=True):
    """A voter's signature: see `rounds.deciding.proof` for what it signs."""

    peer_id: Name
    incarnation: Name
    signature: Signature


class Commit(_Struct, frozen=True):
    """The outcome of a round: the record, and the signed READY of a quorum of its voters, all in this attempt."""

    record: Record
    attempt: Attempt
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_VOTERS)]


class Founding(_Struct, frozen=True):
    """The start of a lineage, signed by its founder, who is the only voter of its next round.

    It goes on from the head of `parent` at `round` with this state. A run's first lineage has the run digest as its
    parent, and round -1.
    """

    parent: Name
    round: Int
    state_hash: Name
    founder: Name
    incarnation: Name
    signature: Signature


class Entry(_Struct, frozen=True):
    """One entry of a run's history: either a committed round or the founding of a lineage."""

    commit: Commit | None
    founding: Founding | None


class Head(_Struct, frozen=True):
    """The last resolved round of a lineage, and what is needed to decide the next one.

    `commit` is of the last committed round, None at genesis; after a new lineage began it is still that of the lineage
    before. `voters` decide the next.
    """

    genesis: Name
    lineage: Name
    round: Int
    state_hash: Name
    anchor_hash: Name
    voters: Voters
    run_step: Int
    tokens_total: Int
    commit: Commit | None

    @property
    def record(self) -> Record | None:
        return self.commit.record if self.commit is not None else None


class SignedHead(_Struct, frozen=True):
    """A head with the signatures of a quorum of its voters, who have the same state; and how the run began."""

    head: Head
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_VOTERS)]
    genesis: Founding


class SavedHistory(_Struct, frozen=True):
    """How a run began, and the last entries of its history; kept in checkpoints."""

    genesis: Founding | None
    entries: Items[Entry]


class Due(_Struct, frozen=True):
    """To all peers: the sender has done its inner steps. `counter` is that of the attempt it expects next."""

    lineage: Text
    round: Int
    counter: Int


class Call(_Struct, frozen=True):
    """From a leader to every live peer: join this attempt within the window."""

    lineage: Text
    round: Int
    attempt: Attempt
    window_s: Float


class Join(_Struct, frozen=True):
    """A promise to refuse lower attempts, and what the leader needs to plan the round.

    `tokens`: trained on since the sender's last inclusion; `shard_tokens`: the size of its shard (0: none).
    `at_length`: the sender has reached the run's length and asks for the last, plain-average round.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    incarnation: Text
    state_hash: Text
    has_snapshot: bool
    tokens: Int
    shard_tokens: Int
    run_step: Int
    speed: Float
    rate: Float
    linked: Items[Text]
    at_length: bool
    ready_attempt: Attempt | None
    ready: Record | None


class Refuse(_Struct, frozen=True):
    """The receiver's attempt is below the sender's promise."""

    lineage: Text
    round: Int
    attempt: Attempt
    promised: Attempt


class RosterPart(_Struct, frozen=True):
    """Blocks [start, stop) of the senders' outer gradients go to this reducer. Empty `senders`: all members."""

    start: Int
    stop: Int
    reducer: Text
    senders: Items[Text]


class Roster(_Struct, frozen=True):
    """The leader's plan of an attempt: its members, and who sends which blocks to whom.

    `expected` holds all members with their weights, and empty Merkle roots: reducers average these until they are told
    otherwise. It is empty if the averaging strategy does not reduce.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    members: Items[Text]
    parts: Items[RosterPart]
    expected: Items[Contributor]


class Contribution(_Struct, frozen=True):
    """To a reducer: blocks [start, stop) of the sender's encoded outer gradient (payload).

    The last chunk of a part has the Merkle root of all chunks of the sender's outer gradient, and the proof that the
    part's chunks are among them. Others have an empty `root`, and so has every chunk in a run without audits.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    start: Int
    stop: Int
    root: Hash
    proof: MerkleProof


class Arrived(_Struct, frozen=True):
    """Reducer to leader: the members whose chunks are complete, and those that stalled or were lost.

    `norms` has the squared norm of this part of the outer gradient for each entry of `complete`, and `roots` the Merkle
    root of its chunks.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    part: Int
    complete: Items[Text]
    failed: Items[Text]
    norms: Items[Float]
    roots: Items[Hash]


class Reduce(_Struct, frozen=True):
    """Leader to reducers: average exactly these contributors, which are not those that the roster expects."""

    lineage: Text
    round: Int
    attempt: Attempt
    contributors: Items[Contributor]


class Reduced(_Struct, frozen=True):
    """Reducer to leader: the hashes of the blobs that it now serves for its part.

    `gram` holds the inner products of the contributors' outer gradients in this part, row by row; empty when there are
    too many contributors. `as_expected`: it has averaged the roster's expected contributors, without a Reduce.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    part: Int
    digests: Items[Text]
    gram: Items[Float]
    as_expected: bool


class Propose(_Struct, frozen=True):
    """Leader to members: fetch the parts of this record, store it as READY, and reply with Ready."""

    attempt: Attempt
    record: Record


class Ready(_Struct, frozen=True):
    """Member to leader: it holds all parts of the record and has stored READY. Signed with the sender's identity."""

    lineage: Text
    round: Int
    attempt: Attempt
    incarnation: Text
    record_sha256: Text
    signature: Signature


class Abort(_Struct, frozen=True):
    """The leader ends this attempt."""

    lineage: Text
    round: Int
    attempt: Attempt
    reason: Reason

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_REASON)


class Withdraw(_Struct, frozen=True):
    """Member to leader: it cannot go on with this attempt."""

    lineage: Text
    round: Int
    attempt: Attempt
    reason: Reason

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_REASON)


class Landed(_Struct, frozen=True):
    """To all peers: the sender's signature under the head that it has now, for those who join."""

    lineage: Text
    round: Int
    incarnation: Text
    signature: Signature


class Accuse(_Struct, frozen=True):
    """From the auditor of a committed round to all: this part is not the mean of its contributors' chunks."""

    lineage: Text
    round: Int
    part: Int


class Mean(_Struct, frozen=True):
    """From a reducer to the members of its attempt: a piece of a part's encoded mean (payload), in order.

    Attributes:
        digest: names the part; empty for the mean of the contributors that the roster expects.
        start: bytes of the part before this piece.
    """

    lineage: Text
    round: Int
    attempt: Attempt
    digest: Name
    start: Int


class PairOffer(_Struct, frozen=True):
    """The sender looks for a partner for its outer step `number`, its own count. Answered with PairAnswer."""

    lineage: Lineage
    number: Count


class PairAnswer(_Struct, frozen=True):
    """The answer to an offer, or (not accepted) the end of a swap that was agreed on.

    Attributes:
        offer: of the receiver's step, as in its offer.
        number: of the sender's own step, if accepted.
    """

    offer: Count
    number: Count
    accepted: bool


class PairWeights(_Struct, frozen=True):
    """To a partner: a chunk of the sender's weights (payload, encoded), in order; last a sample of its anchor.

    Attributes:
        number: of the sender's step.
        start: the first block of the chunk.
    """

    number: Count
    start: Count


class Request(_Struct, frozen=True):
    """A request; `docs/understand/protocol.md` lists each `what` with its `subject` and `index`."""

    request: Int
    what: Text
    subject: Text
    index: Int


class Answer(_Struct, frozen=True):
    """The payload answers a request; `found` is False if the sender does not have it now."""

    request: Int
    found: bool
    note: Prose

    def __post_init__(self) -> None:
        _escape(self, "note", MAX_STRING)


Message = (
    Hello | Beat | Ack | Leave | Fragment | Due | Call | Join | Refuse | Roster | Contribution | Arrived | Reduce
    | Reduced | Propose | Ready | Commit | Abort | Withdraw | Request | Answer | Landed | Accuse | Challenge | Proof
    | Mean | PairOffer | PairAnswer | PairWeights
)  # fmt: skip

# The numbers on the wire: add at the end, never reorder.
KINDS: dict[int, type[Message]] = dict(enumerate(typing.get_args(Message), start=1))
KIND_OF: dict[type[Message], int] = {cls: kind for kind, cls in KINDS.items()}


def pack(value: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """The bytes of a message or of parts of one, the same on every peer."""
    return msgspec.msgpack.encode(value)


def unpack(kind: type[T], data: bytes | memoryview) -> T:
    """Rebuild a message or a part of one from untrusted bytes. Raises WireError, which shows what came."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except ValueError as error:
        raise WireError(f"bad {kind.__name__}: {error}; it came as {_without_schema(data)}") from None


def _without_schema(data: bytes | memoryview) -> str:
    """The beginning of what MessagePack holds, whatever its shape is: another version may have other fields."""
    if len(data) > MAX_SHOWN_BYTES:
        return f"{len(data)} bytes"
    try:
        return shown(repr(msgspec.msgpack.decode(data)), MAX_SHOWN_CHARS)
    except (ValueError, RecursionError):
        return shown(repr(bytes(data[:MAX_SHOWN_CHARS])), MAX_SHOWN_CHARS)
