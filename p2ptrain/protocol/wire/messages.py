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
# Of a message that does not fit its schema: bytes that are decoded for the error, and characters that it shows.
MAX_SHOWN_BYTES, MAX_SHOWN_CHARS = 4096, 80
# So many peers vote at most, so that the leader's wait is bounded in large swarms (guess).
MAX_VOTERS = 31
# A view names at most 94 peers: 30 voters and the 64 that may be drawn, or 31 voters. Room for later versions.
MAX_SEEN = 128
# Nobody finds another peer with the same hash.
VOTER_HASH_BYTES = 16
# A public key and a signature made with it; with an RSA key of 4096 bits, these have 1,070 bytes.
MAX_SIGNATURE_BYTES = 2048
# See `Offer`.
MAX_OFFER_BYTES = 1024
# Members that a heartbeat may name. We name two; later versions may name more.
MAX_BEAT_MEMBERS = 4
# The longest status that we make has 60 characters.
MAX_STATUS = 256
MAX_PEER_ID = 128
# Largest `Beat.reach`: 31 voters, 64 contributors to the last round, and a third of the voters.
MAX_REACH = 105
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
# Hashes of peers with their incarnations, sorted.
Seen = Annotated[bytes, Meta(max_length=VOTER_HASH_BYTES * MAX_SEEN)]
Mac = Annotated[bytes, Meta(max_length=32)]
Maddr = Annotated[str, Meta(max_length=MAX_MADDR_LENGTH, pattern=SAFE_PATTERN)]
Maddrs = Annotated[tuple[Maddr, ...], Meta(max_length=MAX_MADDRS)]
Signature = Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)]
# A hash of 32 bytes, or empty where there is none.
Hash = Annotated[bytes, Meta(max_length=HASH_BYTES)]
# How to open a bulk connection: a port and a self-signed certificate of 200 bytes.
Offer = Annotated[bytes, Meta(max_length=MAX_OFFER_BYTES)]
MerkleProof = Annotated[tuple[Hash, ...], Meta(max_length=MAX_PROOF)]
# A time on the sender's clock, or a duration.
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
# Inner steps per second; 0 if unknown.
Speed = Annotated[float, Meta(ge=0, le=MAX_SPEED)]
# Empty if the sender has none yet.
Lineage = Annotated[str, Meta(pattern=rf"\A({LINEAGE_PATTERN})?\Z")]
Member = tuple[Name, Maddrs]


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Packed as a list of the fields in their order."""


class _OfRound(_Struct, frozen=True):
    """The first fields of a message about one round."""

    lineage: Text
    round: Int


class _OfAttempt(_OfRound, frozen=True):
    """The first fields of a message about one attempt at a round."""

    attempt: Attempt


def _escape(message: msgspec.Struct, name: str, most: int) -> None:
    """Escape a free text of a message that is being made, and cut it to its limit."""
    msgspec.structs.force_setattr(message, name, shown(getattr(message, name), most))


class Hello(_Struct, frozen=True):
    """First frame of every stream of an open run. In a closed run it follows the proofs.

    Observers send an empty digest, and get answers only to the requests in
    `node.requests.FOR_OBSERVERS`. `bulk` is the offer of the sender's `BulkTransport`; empty if it has none.
    """

    run_id: Text
    digest: Text
    incarnation: Name
    role: Text
    maddrs: Maddrs
    bulk: Offer


class Challenge(_Struct, frozen=True):
    """First frame of every stream of a closed run, from both sides: asks the other side for a proof of the run key.

    The dialler's `proof` is empty. The acceptor's answers the dialler's nonce.
    """

    nonce: Mac
    proof: Mac


class Proof(_Struct, frozen=True):
    """Dialler to acceptor: answers the acceptor's nonce."""

    proof: Mac


class Beat(_Struct, frozen=True):
    """Sent every second: a heartbeat with the sender's position, which also measures the round trip.

    `echo_s` is the `sent_s` of the last beat received from the other side and `held_s` how long ago that was. `reach`
    is with how many voters, and contributors to the last rounds, the sender is linked, itself included.
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
    speed: Speed
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_BEAT_MEMBERS)]
    reach: Annotated[int, Meta(ge=0, le=MAX_REACH)]

    def __post_init__(self) -> None:
        _escape(self, "status", MAX_STATUS)


class Ack(_Struct, frozen=True):
    """Acknowledges the bulk bytes received, by the prefix of its frame. It has no fields."""


class Leave(_Struct, frozen=True):
    """The sender leaves the run on purpose."""

    reason: Prose

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_STRING)


class Fragment(_OfRound, frozen=True):
    """Slots of the sender's weights (payload: their blocks, encoded). `age_s`: seconds from gathering to sending."""

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


class View(_Struct, frozen=True):
    """Whom a voter is linked with as it joins a round, signed: see `rounds.deciding.voters`."""

    peer_id: Name
    incarnation: Name
    seen: Seen
    signature: Signature


class Record(_Struct, frozen=True, dict=True):
    """The decision of a round, named by the hash of its packed form.

    `parent_hash` is the hash of the state (anchor and moments) that the round starts from, `intervals` each member's
    next H in inner steps. `cosine` is the average pairwise similarity of the outer gradients, `mean_norm` the norm of
    their mean; 0 if unknown. `voters` decide the next round; their order matters for quorums.
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
    voters: Voters

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(pack(self)).hexdigest()


class Proposal(_Struct, frozen=True):
    """A record, and the views that show why it has its voters. Once decided, a quorum has checked them."""

    record: Record
    views: Annotated[tuple[View, ...], Meta(max_length=MAX_VOTERS)]


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

    The lineage continues from the head of lineage `parent` at `round`, whose state has this hash. A run's first lineage
    has the run digest as its parent, and round -1.
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


class Head(_Struct, frozen=True, dict=True):
    """The last resolved round of a lineage, and what is needed to decide the next one.

    `commit` is that of the last committed round; None at genesis. When a lineage begins, it is still the commit of the
    lineage before. `voters` decide the next round.
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

    @cached_property
    def voter_ids(self) -> frozenset[str]:
        return frozenset(peer_id for peer_id, _ in self.voters)

    @property
    def record(self) -> Record | None:
        return self.commit.record if self.commit is not None else None

    @property
    def contributors(self) -> set[tuple[str, str]]:
        """The peers of the last round, with their incarnations; before the first round the founder."""
        record = self.record
        return set(self.voters) if record is None else {(c.peer_id, c.incarnation) for c in record.contributors}


class SignedHead(_Struct, frozen=True):
    """A head, the signatures of a quorum of its voters, who have the same state, and the founding of the run."""

    head: Head
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_VOTERS)]
    genesis: Founding


class SavedHistory(_Struct, frozen=True):
    """The founding of a run, and the last entries of its history. Checkpoints contain it."""

    genesis: Founding | None
    entries: Items[Entry]


class Due(_OfRound, frozen=True):
    """To all peers: the sender has made its inner steps. `counter` asks for an attempt: it orders who leads next."""

    counter: Int


class Call(_OfAttempt, frozen=True):
    """From a leader to voters and drawn peers: join this attempt within the window."""

    window_s: Float


class Join(_OfAttempt, frozen=True):
    """A promise to refuse lower attempts, and what the leader needs to plan the round.

    `tokens`: how many the sender has trained on since it was last included in a mean. `shard_tokens`: the size of its
    shard; 0 without one. `at_length`: the sender has reached the run's length and asks for the last round, which is a
    plain average. `view`: None of a peer that does not vote.
    """

    incarnation: Name
    state_hash: Text
    has_snapshot: bool
    tokens: Int
    shard_tokens: Int
    run_step: Int
    speed: Speed
    rate: Float
    linked: Items[Text]
    at_length: bool
    view: View | None
    ready_attempt: Attempt | None
    ready: Proposal | None


class Refuse(_OfAttempt, frozen=True):
    """The receiver's attempt is below the sender's promise."""

    promised: Attempt


class RosterPart(_Struct, frozen=True):
    """Blocks [start, stop) of the senders' outer gradients go to this reducer. Empty `senders`: all members."""

    start: Int
    stop: Int
    reducer: Text
    senders: Items[Text]


class Roster(_OfAttempt, frozen=True):
    """The leader's plan of an attempt: its members, and who sends which blocks to whom.

    `expected` holds all members with their weights, and empty Merkle roots. Reducers average these unless a Reduce
    names others. It is empty if the averaging strategy does not reduce.
    """

    members: Items[Text]
    parts: Items[RosterPart]
    expected: Items[Contributor]


class Contribution(_OfAttempt, frozen=True):
    """To a reducer: blocks [start, stop) of the sender's encoded outer gradient (payload).

    The last chunk of a part has the Merkle root of all chunks of the sender's outer gradient, and the proof that the
    part's chunks are among them. Others have an empty `root`, and so has every chunk in a run without audits.
    """

    start: Int
    stop: Int
    root: Hash
    proof: MerkleProof


class Arrived(_OfAttempt, frozen=True):
    """Reducer to leader: the members whose chunks are complete, and those that stalled or were lost.

    For each entry of `complete`, `norms` has the squared norm of this part of its outer gradient, and `roots` the
    Merkle root of its chunks.
    """

    part: Int
    complete: Items[Text]
    failed: Items[Text]
    norms: Items[Float]
    roots: Items[Hash]


class Reduce(_OfAttempt, frozen=True):
    """Leader to reducers: average exactly these contributors, instead of those that the roster expects."""

    contributors: Items[Contributor]


class Reduced(_OfAttempt, frozen=True):
    """Reducer to leader: the hashes of the blobs that it now serves for its part.

    `gram` holds the inner products of the contributors' outer gradients in this part, row by row; it is empty if there
    are too many contributors. `as_expected`: the mean is of the contributors that the roster expects.
    """

    part: Int
    digests: Items[Name]
    gram: Items[Float]
    as_expected: bool


class Propose(_Struct, frozen=True):
    """Leader to members: fetch the parts of this record, store it as READY, and reply with Ready."""

    attempt: Attempt
    proposal: Proposal


class Ready(_OfAttempt, frozen=True):
    """Member to leader: it holds all parts of the record and has stored READY. Signed with the sender's identity."""

    incarnation: Name
    record_sha256: Text
    signature: Signature


class Abort(_OfAttempt, frozen=True):
    """The leader ends this attempt."""

    reason: Reason

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_REASON)


class Withdraw(_OfAttempt, frozen=True):
    """Member to leader: it cannot continue this attempt."""

    reason: Reason

    def __post_init__(self) -> None:
        _escape(self, "reason", MAX_REASON)


class Landed(_OfRound, frozen=True):
    """To all peers: the sender's signature under its new head. Joiners need those of a quorum."""

    incarnation: Name
    signature: Signature


class Accuse(_OfRound, frozen=True):
    """Auditor of a committed round to all peers: this part is not the mean of its contributors' chunks."""

    part: Int


class Mean(_OfAttempt, frozen=True):
    """Reducer to the members of its attempt: the next piece of a part's encoded mean (payload).

    Attributes:
        digest: names the part; empty for the mean of the contributors that the roster expects.
        start: bytes of the part before this piece.
    """

    digest: Name
    start: Int


class PairOffer(_Struct, frozen=True):
    """The sender looks for a partner for its outer step `number`, by its own count. The answer is a PairAnswer."""

    lineage: Lineage
    number: Count


class PairAnswer(_Struct, frozen=True):
    """The answer to an offer. If not accepted, it may also end a swap that was agreed on.

    Attributes:
        offer: the number of the receiver's step, as in its offer.
        number: the number of the sender's own step, if accepted.
    """

    offer: Count
    number: Count
    accepted: bool


class PairWeights(_Struct, frozen=True):
    """To a partner: the next chunk of the sender's encoded weights (payload). The last one is a sample of its anchor.

    Attributes:
        number: the number of the sender's step.
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
    """Answers a request with its payload. `found` is False if the sender does not have it now."""

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
    """Rebuild a message or a part of one from untrusted bytes. Raises WireError with the beginning of the bytes."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except ValueError as error:
        raise WireError(f"bad {kind.__name__}: {error}; it came as {_without_schema(data)}") from None


def _without_schema(data: bytes | memoryview) -> str:
    """The beginning of MessagePack bytes of any shape, as text: another version may have other fields."""
    if len(data) > MAX_SHOWN_BYTES:
        return f"{len(data)} bytes"
    try:
        return shown(repr(msgspec.msgpack.decode(data)), MAX_SHOWN_CHARS)
    except (ValueError, RecursionError):
        return shown(repr(bytes(data[:MAX_SHOWN_CHARS])), MAX_SHOWN_CHARS)
