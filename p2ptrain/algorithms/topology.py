"""Gossip topologies: the peers that a peer pushes to at a step.

They differ in how fast the peers' disagreement shrinks. In a large swarm with small fragments its steady level,
relative to a full average, is 1 over the share that one exchange removes (for k peers; computed, and confirmed in
training to within 10 %):

    k     pairs   push to 1   push to 2   groups of 4
    8     1.75    2.23        1.46        1.17
    64    1.97    2.66        1.72        1.31

Partners are drawn anew at each step: a fixed ring of 64 peers would have a level of 6.4, because updates take long
around it. "push" needs no agreement between peers. The other topologies need all peers to agree on the step and on the
live peers; if they do not, some partners do not choose each other, which only costs some mixing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Protocol

TOPOLOGIES = ("push", "pairs", "groups", "all")


class Sampler(Protocol):
    """The part of `random.Random` that is used."""

    def sample(self, population: Sequence[str], k: int, /) -> list[str]: ...


def partners(
    topology: str, own: str, peers: Collection[str], *, fan_out: int, seed: int, step: int, rng: Sampler
) -> list[str]:
    """Return the peers that `own` pushes to at this step.

    Args:
        topology: "push", `fan_out` distinct peers, uniformly random; "pairs", a random perfect matching, in which
            partners choose each other; "groups", random groups of fan_out + 1 in which each pushes to all others;
            "all", all peers, which is the full average of the SPARTA paper.
        own: this peer's id.
        peers: ids of the live peers; `own` may be among them.
        fan_out: pushes per step, at least 1; ignored by "pairs" and "all".
        seed, step: the run's seed and the step that all peers share; they determine the shuffle of "pairs" and
            "groups".
        rng: random numbers for "push".

    Returns:
        Distinct ids without `own`; none for the peer left over from the pairs or groups.
    """
    assert topology in TOPOLOGIES, topology
    assert fan_out >= 1, fan_out
    others = sorted(set(peers) - {own})
    if topology == "all":
        return others
    if topology == "push":
        return rng.sample(others, min(fan_out, len(others)))
    size = 2 if topology == "pairs" else fan_out + 1
    shuffled = sorted([own, *others], key=lambda peer: (_rank(peer, seed, step), peer))
    start = shuffled.index(own) // size * size
    return [peer for peer in shuffled[start : start + size] if peer != own]


def _rank(peer: str, seed: int, step: int) -> bytes:
    """A pseudo-random number for each peer and step: sorting by it is a uniform shuffle that all peers agree on."""
    return hashlib.blake2b(f"{seed} {step} {peer}".encode(), digest_size=8).digest()
