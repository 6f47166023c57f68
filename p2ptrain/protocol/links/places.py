"""Whose greeting or link ends for a new one when all places are taken. Pure.

Identities are free: if whoever came first kept its place, one stranger could hold all of them. So the oldest gives way,
and a newcomer has its place until as many others have come after it as there are places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from p2ptrain.protocol.links.handshake import OBSERVER
from p2ptrain.protocol.wire.transport import PeerId

# Streams before their Hello, in all and of one peer. A hundred peers may start at once.
MAX_GREETING = 128
MAX_GREETING_OF_ONE = 2
# Links that are accepted. Our own side dials at most 128 peers, as do joining peers; the rest is for those and for
# observers. The small frames of all links take 32 MiB at most.
MAX_LINKS = 256
# Of these, links of observers: dashboards, and joiners that ask for the settings, which takes a second (guess).
MAX_OBSERVERS = 64


def greeting_to_end(greetings: Sequence[PeerId], newcomer: PeerId) -> int | None:
    """The index of the greeting that ends for a stream of `newcomer`; None while there is a place.

    A peer that has all that one may have loses its own oldest. If all places are taken, the oldest of the peers that
    hold most is ended.

    Args:
        greetings: whose each unfinished greeting is, the oldest first.
    """
    held = Counter(greetings)
    if held[newcomer] >= MAX_GREETING_OF_ONE:
        return greetings.index(newcomer)
    if len(greetings) < MAX_GREETING:
        return None
    most = max(held.values())
    return next(index for index, peer_id in enumerate(greetings) if held[peer_id] == most)


def excess_observers(role: str, members: int, observers: int) -> int | None:
    """How many observers, the oldest ones, lose their link to a newcomer; None: it is refused.

    It is refused if all places are those of members.

    Args:
        role: of the newcomer.
        members, observers: how many others have a link.
    """
    excess = members + observers + 1 - MAX_LINKS
    if role == OBSERVER:
        excess = max(excess, observers + 1 - MAX_OBSERVERS)
    return max(0, excess) if excess <= observers else None
