"""A leader's decisions from the Joins: contributors, weights and reducers. Pure.

Claims of one peer are limited by those of the others, so that a single wrong number has little effect.
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

# Contributors per round; further members are left out (guess).
MAX_CONTRIBUTORS = 64
# A claimed rate is limited to this many times the median.
MOST_RATES = 4.0
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


def agreed_state(joins: Mapping[PeerId, Join], own: str) -> str:
    """The state of most joined peers; on a tie, our own. `joins` is not empty."""
    states = [join.state_sha256 for join in joins.values()]
    return max(set(states), key=lambda state: (states.count(state), state == own))


def members_of(lineage: str, round_: int, joins: Mapping[PeerId, Join], state_sha256: str) -> list[PeerId]:
    """Members with a snapshot on the agreed state, sorted; a sample by a hash of round and id if too many."""
    able = [p for p, join in joins.items() if join.has_snapshot and join.state_sha256 == state_sha256]

    def draw(peer_id: PeerId) -> bytes:
        return hashlib.blake2b(f"{lineage}/{round_}/{peer_id}".encode(), digest_size=8).digest()

    return sorted(sorted(able, key=draw)[:MAX_CONTRIBUTORS])


def reducers_of(
    members: Sequence[PeerId], joins: Mapping[PeerId, Join], avoided: Collection[PeerId] = ()
) -> list[PeerId]:
    """Members that are linked to all other members, the best-connected first; may be empty.

    Args:
        avoided: peers that were silent as reducers or broke the protocol; used only if no other can reduce.
    """
    linked = [
        reducer for reducer in members if all(reducer in joins[other].linked for other in members if other != reducer)
    ]
    able = [reducer for reducer in linked if reducer not in avoided] or linked
    most = MOST_RATES * statistics.median_low([joins[peer].rate for peer in able] or [0.0])
    return sorted(able, key=lambda peer_id: (-min(joins[peer_id].rate, most), peer_id))


def weights_of(run: RunConfig, joins: Sequence[Join]) -> list[float]:
    """Weights of outer gradients, in the order of `joins`: none more than twice the median's tokens."""
    match run.round_weights:
        case "equal":
            return [1.0] * len(joins)
        case "shard":
            return token_weights([join.shard_tokens for join in joins])
    return token_weights([join.tokens for join in joins])


def included(
    members: Sequence[PeerId], complete: Mapping[PeerId, Collection[int]], parts: Collection[int],
    gone: Collection[PeerId],
) -> list[PeerId]:  # fmt: skip
    """The contributors: members that are complete at all of these parts, and not gone."""
    return [member for member in members if member not in gone and set(parts) <= set(complete.get(member, ()))]
