"""A hostile member that sends well-formed messages with random contents at any time.

It may spoil rounds while it is linked (the round protocol does not tolerate liars), but it ends no peer, keeps no peer
busy for ever, and once it has gone the others continue normally.
"""

from __future__ import annotations

import random
import types
import typing
from typing import Any

import pytest
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.protocol.links.limits import Strikes
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.wire.messages import (
    KIND_OF,
    Ack,
    Answer,
    Attempt,
    Beat,
    Contribution,
    Fragment,
    Head,
    Hello,
    Leave,
    Message,
    Record,
    Request,
    pack,
)
from tests.protocol.storm import SHAPES
from tests.protocol.swarm import RUN, Swarm, run_virtual, swarm
from tests.protocol.wiring import start_endpoint

NAMES = "abc"
# What it sends of its own accord: all but the frames that a link itself makes.
BABBLE = [kind for kind in KIND_OF if kind not in (Hello, Ack, Answer, Leave)]


class Babbler:
    """Makes messages of every kind from values that it has seen in the swarm, and from others."""

    def __init__(self, s: Swarm, seed: int) -> None:
        self._swarm = s
        self._rng = random.Random(seed)

    def _head(self) -> Head:
        return self._rng.choice(sorted(self._swarm.peers.items()))[1].node.driver.head

    def make(self, kind: type[Any], name: str = "") -> Any:
        rng, head = self._rng, self._head()
        if name == "lineage" and rng.random() < 0.8:
            return head.lineage
        if name == "round" and rng.random() < 0.8:
            return head.round + rng.choice([0, 1, 1, 1, 2])
        if name == "parent_hash" and rng.random() < 0.8:
            return head.state_hash
        if kind is Attempt and rng.random() < 0.8:
            promised = self._swarm.peers["a"].node.driver.round_state.acceptor.promised
            leader = rng.choice(["x", "x", *NAMES])
            return Attempt(promised.counter + rng.choice([0, 1, 5]), leader, f"{leader}.1")
        if kind is Record and head.record is not None and rng.random() < 0.3:
            return head.record
        if kind is str:
            return rng.choice(["", "x", *NAMES, "a.1", head.lineage, head.genesis, head.state_hash, "9-beef", "part"])
        if kind is int:
            return rng.choice([-1, 0, 1, 2, 7, head.round, head.round + 1, 34, 64, 100, 2**40])
        if kind is float:
            return rng.choice([0.0, -1.0, 0.5, 1.0, 1e-9, 1e9])
        if kind is bool:
            return rng.random() < 0.5
        inner = typing.get_args(kind)
        if isinstance(kind, types.UnionType):
            return None if rng.random() < 0.5 else self.make(inner[0])
        if typing.get_origin(kind) is tuple:
            count = rng.randrange(4) if inner[-1] is Ellipsis else len(inner)
            return tuple(self.make(inner[0] if inner[-1] is Ellipsis else inner[i]) for i in range(count))
        return kind(*(self.make(hint, field) for field, hint in typing.get_type_hints(kind).items()))

    def payload(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.2:
            return pack(self._head())
        return rng.randbytes(rng.choice([0, 1, 66, 66 * 8, 5000, 128 * 1024]))

    async def talk(self) -> None:
        """Link to everyone, again whenever one hangs up, and talk until cancelled."""
        s, rng = self._swarm, self._rng
        hello = Hello(s.run.run_id, s.run.digest, "x.1", "trainer", ("/memory/x",), b"")
        async with trio.open_nursery() as nursery:
            endpoint = await start_endpoint(s.network, nursery, hello)

            async def answer(link: Any, request: Request) -> None:
                found = rng.random() < 0.7
                await link.send_bulk(Answer(request.request, found, request.what), self.payload(), Traffic.STATE)

            endpoint.on_request = answer
            while True:
                await trio.sleep(rng.uniform(0.0, 0.1))
                try:
                    link = await endpoint.links.connect(rng.choice(NAMES), [])
                    message: Message = self.make(rng.choice(BABBLE))
                    if isinstance(message, (Contribution, Fragment)):
                        await link.send_bulk(message, self.payload(), Traffic.ROUND)
                    elif isinstance(message, Beat):
                        link.make_beat(lambda *_, beat=message: beat)
                    else:
                        link.send(message)
                except PeerLostError:
                    # Struck off: it comes back under its old name with a clean slate.
                    for peer in s.peers.values():
                        peer.node.links._strikes = Strikes()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_a_member_that_says_anything_at_all(seed: int) -> None:
    async def main() -> None:
        async with swarm(RUN, seed=seed, shapes=SHAPES) as s:
            for name in NAMES:
                s.start(name, founder=name == "a")
            await s.until_joined()
            with trio.move_on_after(60):
                await Babbler(s, seed).talk()
            s.network.crash("x")
            assert [p.error for p in s.peers.values()] == [None] * len(NAMES)
            gone = trio.current_time()
            # Whether rounds that it took part in were agreed on is not promised; the ones after are.
            s.run_audit = RunAudit()
            await s.until(
                lambda: all(
                    any(r["t"] > gone and len(r["contributors"]) == len(NAMES) for r in p.rounds())
                    for p in s.peers.values()
                ),
                within_s=400,
            )
            assert len({p.node.driver.head.state_hash for p in s.peers.values()}) <= 2

    run_virtual(main, seed)
