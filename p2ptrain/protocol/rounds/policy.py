"""Who takes part in a round, what each counts, and who averages: pure decisions of a leader on what members say.

What others claim is bounded here by what the rest of them say, so that one odd number decides nothing.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Mapping, Sequence

from p2ptrain.algorithms.averaging import token_weights
from p2ptrain.errors import WireError
from p2ptrain.protocol.wire.messages import Join
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# A round has at most this many contributors; the others adopt its outcome as members that were left out (guess).
MAX_CONTRIBUTORS = 64
# A claimed rate counts as at most so many times the median of the claims.
MOST_RATES = 4.0
# Floats count no further, and no training gets there.
MOST_COUNT = 2**53


def check_join(join: Join) -> None:
    """Raises WireError on claims that cannot be true."""
    for name in ("tokens", "shard_tokens", "run_step"):
        if not 0 <= getattr(join, name) <= MOST_COUNT:
            raise WireError(f"a Join with {name} = {getattr(join, name)}: must be between 0 and 2^53")
    for name in ("speed", "rate"):
        if getattr(join, name) < 0:
            raise WireError(f"a Join with {name} = {getattr(join, name)}: must be 0 or more")


def agreed_state(joins: Mapping[PeerId, Join], own: str) -> str:
    """The state that most of those who joined stand on; where two are as many, our own. `joins` is not empty."""
    states = [join.state_sha256 for join in joins.values()]
    return max(set(states), key=lambda state: (states.count(state), state == own))


def members_of(lineage: str, round_: int, joins: Mapping[PeerId, Join], state_sha256: str) -> list[PeerId]:
    """Who contributes: those with a snapshot on the agreed state, a sample where there are too many; sorted.

    The sample is drawn by a hash of round and id, anew for every round, so that in the long run all count alike.
    """
    able = [p for p, join in joins.items() if join.has_snapshot and join.state_sha256 == state_sha256]

    def draw(peer_id: PeerId) -> bytes:
        return hashlib.blake2b(f"{lineage}/{round_}/{peer_id}".encode(), digest_size=8).digest()

    return sorted(sorted(able, key=draw)[:MAX_CONTRIBUTORS])


def reducers_of(
    members: Sequence[PeerId], joins: Mapping[PeerId, Join], avoided: Collection[PeerId] = ()
) -> list[PeerId]:
    """Members that are linked to all the others, the best-connected first; may be empty.

    Args:
        avoided: those who kept silent as reducers, or broke the protocol; asked only where nobody else can.
    """
    linked = [
        reducer for reducer in members if all(reducer in joins[other].linked for other in members if other != reducer)
    ]
    able = [reducer for reducer in linked if reducer not in avoided] or linked
    most = MOST_RATES * statistics.median_low([joins[peer].rate for peer in able] or [0.0])
    return sorted(able, key=lambda peer_id: (-min(joins[peer_id].rate, most), peer_id))


def weights_of(run: RunConfig, joins: Sequence[Join]) -> list[float]:
    """How outer gradients are weighted, in the order of `joins`: none more than twice the median's tokens."""
    match run.round_weights:
        case "equal":
            return [1.0] * len(joins)
        case "shard":
            return token_weights([join.shard_tokens for join in joins])
    return token_weights([join.tokens for join in joins])


def included(
    members: Sequence[PeerId],
    complete: Mapping[PeerId, Collection[int]],
    parts: Collection[int],
    gone: Collection[PeerId],
) -> list[PeerId]:
    """The contributors: members whose outer gradient is whole at every one of these parts, and that are not gone."""
    return [member for member in members if member not in gone and set(parts) <= set(complete.get(member, ()))]
