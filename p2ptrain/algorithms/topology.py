"""Whom a peer pushes to at a step.

What matters is how fast the peers' disagreement shrinks. In a large swarm with small fragments its steady level,
relative to a full average, is 1 over the share that one exchange takes off (k peers, computed here, and measured in
training within 10 %):

    k     pairs   push to 1   push to 2   groups of 4
    8     1.75    2.23        1.46        1.17
    64    1.97    2.66        1.72        1.31

Partners are drawn anew at each step: a fixed ring would stand at 6.4 with 64 peers, as news takes long around it.
"push" asks nothing of the others; the rest needs all peers to agree on the step and on who is there, and where they do
not, somebody's partner looks elsewhere, which costs some mixing and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Protocol

TOPOLOGIES = ("push", "pairs", "groups", "all")


class Sampler(Protocol):
    """What is asked of a source of randomness; `random.Random` has it."""

    def sample(self, population: Sequence[str], k: int, /) -> list[str]: ...


def partners(
    topology: str, own: str, peers: Collection[str], *, fan_out: int, seed: int, step: int, rng: Sampler
) -> list[str]:
    """The peers that `own` pushes to at this step.

    Args:
        topology: "push", `fan_out` distinct peers, uniformly random; "pairs", a random perfect matching, in which
            partners choose each other; "groups", random groups of fan_out + 1 in which each pushes to all others;
            "all", everybody, which is the full average of the SPARTA paper.
        own: this peer's id.
        peers: ids of the live peers; `own` may be among them.
        fan_out: pushes a step, at least 1; "pairs" and "all" do not ask.
        seed, step: of the run and of the shared walk; they name the shuffle behind "pairs" and "groups".
        rng: for "push".

    Returns:
        Distinct ids without `own`: fewer than `fan_out` when there are fewer; none for the odd one of "pairs", or for a
        single one left over from the groups.
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
