"""What a message of a round may claim; messages that claim more are refused. Pure."""

from __future__ import annotations

from p2ptrain.algorithms.averaging import MAX_MEAN
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.merkle import HASH_BYTES
from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import Arrived, Join, Record, Roster
from p2ptrain.protocol.wire.transport import PeerId

# Contributors per round; further members are left out (guess).
MAX_CONTRIBUTORS = 64
# The largest integer that floats represent exactly.
MOST_COUNT = 2**53


def check_join(join: Join) -> None:
    """Raises WireError on impossible claims."""
    for name in ("tokens", "shard_tokens", "run_step"):
        if not 0 <= getattr(join, name) <= MOST_COUNT:
            raise WireError(f"a Join with {name} = {getattr(join, name)}: must be between 0 and 2^53")
    for name in ("speed", "rate"):
        if getattr(join, name) < 0:
            raise WireError(f"a Join with {name} = {getattr(join, name)}: must be 0 or more")


def most_square(num_blocks: int) -> float:
    """The largest squared norm of so many blocks of an encoded outer gradient."""
    return MAX_MEAN**2 * BLOCK * num_blocks


def root_bytes(*, sealed: bool) -> int:
    """The size of each member's Merkle root: members give one exactly if they commit to their chunks."""
    return HASH_BYTES if sealed else 0


def check_arrived(arrived: Arrived, *, sealed: bool, num_blocks: int) -> None:
    """Raises WireError unless each complete member has a possible norm, and a Merkle root exactly if `sealed`.

    Args:
        sealed: whether members of this run commit to their chunks.
        num_blocks: of the whole model.
    """
    size, counts = root_bytes(sealed=sealed), {len(arrived.complete), len(arrived.norms), len(arrived.roots)}
    if len(counts) > 1 or any(len(root) != size for root in arrived.roots):
        raise WireError("an Arrived whose members have not one norm and one root each")
    most = most_square(num_blocks)
    for norm in arrived.norms:
        if not 0 <= norm <= most:
            raise WireError(f"an Arrived with squared norm {norm:.3g}: must be between 0 and {most:.3g}")


def check_size(record: Record) -> None:
    """Raises WireError if a record has more contributors, members or parts than a round can have."""
    if max(map(len, (record.contributors, record.intervals, record.parts))) > MAX_CONTRIBUTORS:
        raise WireError(f"a record of more than {MAX_CONTRIBUTORS} contributors, members or parts")


def check_roster(roster: Roster, own: PeerId) -> None:
    """Raises WireError unless these are possible members, us among them, who reduce at most one part each."""
    members, reducers = roster.members, [part.reducer for part in roster.parts]
    if len(members) > MAX_CONTRIBUTORS or list(members) != sorted(set(members)) or own not in members:
        raise WireError(f"a roster of {len(members)} members: at most {MAX_CONTRIBUTORS}, sorted, distinct, and us")
    if len(set(reducers)) < len(reducers) or not set(reducers) <= set(members):
        raise WireError("a roster whose parts are not each for another member")
    if roster.expected and tuple(c.peer_id for c in roster.expected) != members:
        raise WireError("a roster that expects others than its members")
    if roster.expected and not any(c.weight > 0 for c in roster.expected):
        raise WireError("a roster whose expected contributors have no weight")
    if any(c.root or not 0 <= c.weight <= MOST_COUNT for c in roster.expected):
        raise WireError("a roster whose expected contributors have Merkle roots, or a weight out of 0 to 2^53")
    for senders in {part.senders for part in roster.parts}:
        if list(senders) != sorted(set(senders)) or not set(senders) <= set(members):
            raise WireError("a roster part whose senders are not distinct members, sorted")
