"""Which peers contribute to a round, if there are more than one round can hold. Pure.

A hash of the state that the round starts from, and of the id, gives each peer a rank. The leader calls the peers of
lowest rank that it is linked with. No peer knows all others of a large swarm, so each decides by its own rank and an
estimate of the swarm's size whether it may be among those. If so, it links to the voters, one of which leads. A draw is
known only once the previous round is decided, so no id can be chosen that is drawn again and again.

Partial participation by a random draw is that of federated averaging (McMahan et al., "Communication-Efficient Learning
of Deep Networks from Decentralized Data", 2017).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from p2ptrain.protocol.wire.transport import PeerId

# More link to the voters than contribute: the estimate of the size may be 10 % off, and some are lost (guess).
MARGIN = 1.25
# A link is kept if one of its ends may think so that both take part: estimates differ by that much (guess).
MARGIN_OF_OTHERS = 1.5
_RANKS = 2**64


def rank(state_hash: str, peer_id: PeerId) -> int:
    """The rank of a peer in the draw of the round that starts from this state, from 0 to 2^64 - 1: uniform."""
    return int.from_bytes(hashlib.blake2b(f"{state_hash}/{peer_id}".encode(), digest_size=8).digest())


def drawn(state_hash: str, peer_ids: Iterable[PeerId], most: int) -> list[PeerId]:
    """The `most` peers of lowest rank, in the order of their ids."""
    return sorted(sorted(peer_ids, key=lambda peer_id: rank(state_hash, peer_id))[:most])


def may_be_drawn(own_rank: int, most: int, swarm_size: float, margin: float = MARGIN) -> bool:
    """Whether a peer of this rank is likely among the `most` of lowest rank in a swarm of about this size."""
    return own_rank * swarm_size < _RANKS * most * margin
