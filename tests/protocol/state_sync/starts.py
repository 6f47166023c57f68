"""How a run comes to be started twice, for the tests of what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.rounds.deciding.history import History, lineage_of
from p2ptrain.protocol.rounds.deciding.lineage import PastHeads
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.wire.messages import Attempt, Commit, Contributor, Entry, Head, Ready, SignedHead, Vote
from tests.protocol.signing import record_after
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


def made_up_round(driver: RoundDriver, lineage: str, round_: int) -> Entry:
    """A round that a peer committed alone, in any lineage."""
    own, prover = driver.context.liveness.own, driver.context.prover
    record = record_after(driver.head.genesis, lineage, round_, own[0])
    record = msgspec.structs.replace(record, contributors=(Contributor(*own, 1.0, bytes(32)),), voters=(own,))
    record = msgspec.structs.replace(record, run_step=1000, tokens_total=10**9)
    ready = Ready(lineage, round_, Attempt(1, *own), own[1], record.sha256, b"")
    return Entry(Commit(record, Attempt(1, *own), (Vote(*own, prover.signed_ready(ready).signature),)), None)


def stay_away(s: Swarm, name: str) -> None:
    """A peer does not come back to the others, whatever they show."""
    s.peers[name].node.state_sync.on_beat = lambda link, beat: None  # type: ignore[method-assign]


@asynccontextmanager
async def lying(s: Swarm, name: str) -> AsyncIterator[RoundDriver]:
    """In the block a peer has a made-up state, and its driver adopts any head. After it, it stays there."""
    driver = s.peers[name].node.driver
    s.peers[name].paused = False  # what it has received lands
    async with driver.paused():
        driver.context.state.anchor[:] = 7.0
        driver.context.state.rehash()
        driver.past_heads = PastHeads()
        yield driver
    s.peers[name].paused = True
    stay_away(s, name)


async def lie(s: Swarm, name: str, how: Literal["rooted", "unrooted", "theirs"], last: int = 1000) -> Head:
    """A peer shows made-up rounds of the start whose genesis it has: all from the genesis on, or the last one only.

    Args:
        how: "rooted" (50 rounds) and "unrooted", in a lineage of its own, or "theirs", in that of the others.
        last: the made-up round, if it is the only one.
    """
    async with lying(s, name) as driver:
        own, prover, genesis = driver.context.liveness.own, driver.context.prover, driver.history.genesis
        assert genesis is not None
        hashes = driver.context.state.hashes
        founding = prover.founding(driver.head.genesis, -1, "0" * 64)
        lineage = driver.head.lineage if how == "theirs" else lineage_of(founding)
        entries = [Entry(None, genesis), Entry(None, founding)] if how == "rooted" else []
        for round_ in range(50) if how == "rooted" else (last,):
            entries.append(made_up_round(driver, lineage, round_))
        head = msgspec.structs.replace(
            driver.head, lineage=lineage, round=round_, run_step=1000, tokens_total=10**9, state_hash=hashes.state,
            anchor_hash=hashes.anchor, voters=(own,), commit=entries[-1].commit,
        )  # fmt: skip
        signed = SignedHead(head, (Vote(*own, prover.signature_of(head)),), genesis)
        driver.adopt(signed, History(genesis, entries))
    return head


async def abet(s: Swarm, name: str, liar: str) -> None:
    """A peer shows what a liar shows."""
    shown = s.peers[liar].node.driver
    async with lying(s, name) as driver:
        driver.adopt(shown.signed_head, History(shown.history.genesis, list(shown.history.entries)))


async def keep_dialling(s: Swarm, name: str, other: str) -> None:
    """Dial another peer whenever it is not linked, until cancelled."""
    links = s.peers[name].node.links
    while True:
        if other not in links.live:
            with contextlib.suppress(PeerLostError), trio.move_on_after(3):
                await links.connect(other, [f"/mem/{other}"])
        await trio.sleep(0.1)
