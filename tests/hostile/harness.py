"""Honest peers on the memory network, a liar among them, and what must hold after it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import NamedTuple

import pytest
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.links.limits import Strikes
from tests.hostile.liar import Liar, member, stranger
from tests.hostile.values import Facts
from tests.protocol.swarm import RUN, Shapes, Swarm, TestPeer, common, run_virtual, swarm

NAMES = "abc"
STEP_S = 0.1
PAIRWISE = dataclasses.replace(RUN, averaging="pairwise", outer_optimizer="sgdm", outer_lr=0.7, outer_momentum=0.5)
INTERVAL_S = RUN.sync_every * STEP_S
# Small: what is tested does not depend on the size.
SHAPES: Shapes = [("embedding", (40, 64)), ("head", (70,))]
Attack = Callable[[Liar, Swarm], Awaitable[None]]


@contextmanager
def no_bugs() -> Iterator[list[str]]:
    """Fails if an exception was contained that is not about the bytes of a peer: one of our bugs."""
    bugs: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ErrorLog, "note", lambda self, where, error: bugs.append(f"{where}: {error!r}"))
        yield bugs
    assert not bugs, bugs[:5]


class Scene(NamedTuple):
    """A swarm, the liar in it, and the bugs that came up so far."""

    swarm: Swarm
    liar: Liar
    bugs: list[str]


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only: an attack makes thousands of lines."""
    logger = logging.getLogger("p2ptrain")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@asynccontextmanager
async def attacked(
    *, as_member: bool, before_rounds: bool = False, pairwise: bool = False, seed: int = 0
) -> AsyncIterator[Scene]:
    """Three honest peers and a liar among them; the block attacks. Then the liar goes, and all must be well.

    - No peer has ended, and no exception but about a peer's bytes came up.
    - They trained at 80 % of their speed or more. Steps wait for nobody, so virtual time shows what waited.
    - Within three intervals after the liar has gone they commit a round together, with the same bytes. With pairwise
      steps, each takes one with another within nine.
    """
    with no_bugs() as bugs, quiet():
        async with swarm(PAIRWISE if pairwise else RUN, seed=seed, shapes=SHAPES) as s:
            for name in NAMES:
                s.start(name, founder=name == "a", step_s=STEP_S)
            if as_member:
                liar = member(s.start("x", step_s=STEP_S).node)
            else:
                liar = await stranger(s._nursery, s.network.transport("x"), s.run.run_id, s.run.digest)
            await s.until_joined()
            if pairwise and not before_rounds:
                await s.until(lambda: all(map(paired, s.peers.values())))
            elif not before_rounds:
                await s.until(lambda: common(s, 2, 4 if as_member else 3))
            began, steps = trio.current_time(), {name: len(s.peers[name].reports) for name in NAMES}
            yield Scene(s, liar, bugs)
            elapsed_s = trio.current_time() - began
            for name in NAMES:
                speed = (len(s.peers[name].reports) - steps[name]) / elapsed_s if elapsed_s > 1 else 1 / STEP_S
                assert speed >= 0.8 / STEP_S, f"{name} trained {speed * STEP_S:.0%} as fast while attacked"
            if "x" in s.peers:
                s.kill("x")
            else:
                s.network.crash("x")
            await (recovered_pairs if pairwise else recovered)(s)


def paired(peer: TestPeer, since_s: float = 0.0) -> bool:
    """Whether it has taken a step with a partner."""
    return any(e["event"] == "pair" and e["status"] == "paired" and e["t"] > since_s for e in peer.events)


async def recovered_pairs(s: Swarm) -> None:
    """Wait nine intervals, as of three peers one has no partner."""
    gone = trio.current_time()
    await s.until(lambda: all(paired(peer, gone) for peer in s.peers.values()), within_s=9 * INTERVAL_S)
    assert all(peer.flat().isfinite().all() for peer in s.peers.values())


async def recovered(s: Swarm) -> None:
    """Wait three intervals, and check what the honest peers have by then."""
    gone = trio.current_time()

    def together() -> bool:
        heads = {p.node.driver.head.state_hash for p in s.peers.values()}
        return len(heads) == 1 and all(
            any(r["t"] > gone and len(r["contributors"]) == len(NAMES) for r in p.rounds("committed"))
            for p in s.peers.values()
        )

    await s.until(together, within_s=3 * INTERVAL_S)
    s.check()


def size_of(peer: TestPeer) -> float:
    """The root mean square of its weights."""
    return float(peer.flat().square().mean().sqrt())


@cache
def undisturbed() -> tuple[float, ...]:
    """The size of the weights of such a swarm without a liar, second by second."""
    sizes: list[float] = []

    async def main() -> None:
        async with swarm(RUN, shapes=SHAPES) as s:
            for name in NAMES:
                s.start(name, founder=name == "a", step_s=STEP_S)
            for _ in range(40):
                await trio.sleep(1)
                sizes.append(size_of(s.peers["a"]))

    run_virtual(main)
    return tuple(sizes)


def check_sizes(s: Swarm, sizes: tuple[float, ...]) -> None:
    """Their weights have about the size that training without a liar gives them by now."""
    expected = sizes[min(len(sizes), int(trio.current_time())) - 1]
    for name in NAMES:
        ratio = size_of(s.peers[name]) / expected
        assert 0.5 < ratio < 2, f"the weights of {name} are {ratio:.3g} times as large as without a liar"


def facts(s: Swarm) -> Facts:
    """What anybody linked to the swarm knows."""
    node = s.peers["a"].node
    slots = node._gossip._num_slots if node._gossip is not None else 0
    return Facts(node.driver.head, (*NAMES, "x"), slots)


def forgive(s: Swarm, liar: Liar) -> None:
    """Take back all strikes, so that one identity can go on. Identities are free: it would come as another.

    Also those that it has given itself, as its own links know nothing of what it sends between their frames.
    """
    for links in (liar.links, *(peer.node.links for peer in s.peers.values())):
        links._strikes = Strikes()
