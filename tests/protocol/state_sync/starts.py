"""How a run comes to be started twice, for the tests of what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tests.protocol.swarm import RUN, Swarm

PLAIN = dataclasses.replace(RUN, sync_every=100, fragment_fraction=0.0)


def geneses(s: Swarm, names: Collection[str]) -> set[str]:
    return {s.peers[name].node.driver.head.genesis for name in names}


async def start_twice(s: Swarm) -> None:
    """Two pairs of peers, joined through one bootstrap node, do not reach each other: each founds the run."""
    s.network.partition(["a", "d"], ["b", "c"])
    for name in "abcd":
        s.start(name, chosen=["bootstrap"])
    await s.until_joined(within_s=20)
    assert len(geneses(s, "abcd")) == 2


async def start_anew(s: Swarm, founder: str, *others: str) -> None:
    """Kill the founder and start it again. It founds the run anew, as neither it nor the others reach anybody."""
    s.kill(founder)
    s.network.partition([founder], *([name] for name in others))
    s.start(founder, founder=True)
    await s.until_joined(founder)
