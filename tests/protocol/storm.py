"""A seeded storm of faults over a swarm on the memory network, and its reduction to the shortest failing one.

A storm is data: a list of faults, each with its time, its victims and how long it lasts. So it can be played again,
with any of its faults left out, and what is left in the end is printed as Python that plays it.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import trio

from p2ptrain.memory_network import PacketFault
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.messages import KIND_OF
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import RUN, Shapes, Swarm, Witness, run_virtual, swarm

PLAIN = dataclasses.replace(RUN, round_codec="none", fragment_fraction=0.0)
GOSSIP = dataclasses.replace(RUN, fragment_fraction=0.02)
NAMES = "abcdefgh"
# Half as large as elsewhere: twice as many storms in the same time. More than one chunk still.
SHAPES: Shapes = [("embedding", (40, 64)), ("bias", (70,)), ("head", (1100, 64))]
# What may come twice. A repeated frame of bulk, or a second Hello, is a broken partner: see test_hostile.
# And nothing gets lost on a link that stays: streams are reliable, and what a broken one lost is lost with its link.
CONTROL = frozenset(
    KIND_OF[kind]
    for kind in (
        messages.Due, messages.Call, messages.Join, messages.Roster, messages.Arrived, messages.Reduce,
        messages.Reduced, messages.Propose, messages.Ready, messages.Commit, messages.Refuse, messages.Abort,
        messages.Withdraw, messages.Beat,
    )
)  # fmt: skip
ACTIONS = ("kill", "leave", "stop", "freeze", "split", "break", "repeat", "delay", "narrow", "restart")
# Virtual seconds of faults.
STORM_S = 45.0
# Seconds between two rounds: the most peers for which a storm takes less than half a minute to run. Short intervals
# have few steps, as these would be most of the work.
PACES = {0.05: 2, 0.2: 3, 1.0: 8, 2.0: 8, 5.0: 8, 30.0: 8}
# A node that fails a sixth time in a row is given up.
MOST_RESTARTS = 5
# Longer than the 10 s after which a silent link is given up, so that each side of a split has rounds of its own.
LONGEST_S = 25.0
# Peers that lost the others for good begin anew after 60 s, meet again within a minute, and then need a round.
CALM_S = 400.0


@dataclass(frozen=True)
class Trouble:
    """One fault: `victims` suffer `action` from `at_s` on for `lasts_s`.

    kill and leave: gone, and started anew after it; restart: its node fails; stop: training stands still; freeze: so
    does its network; split: these against the others; break, repeat: share `amount` of packets breaks its stream, or
    (of control messages) comes twice; delay: up to `amount` seconds more for each packet; narrow: a link of `amount`
    bytes a second.
    """

    at_s: float
    action: str
    victims: str
    lasts_s: float
    amount: float = 0.0


@dataclass(frozen=True)
class Storm:
    """Everything that happens to a swarm of `size` peers. `seed` is of the peers' own choices."""

    seed: int
    size: int
    latency_s: float
    gossip: bool
    troubles: tuple[Trouble, ...]
    averaging: str = "parts"
    interval_s: float = 2.0

    @classmethod
    def of(cls, seed: int, averaging: str = "parts") -> Storm:
        rng = random.Random(seed)
        interval_s = rng.choice(list(PACES))
        size = min(rng.choice([2, 3, 4, 5, 8]), PACES[interval_s])
        troubles = [_trouble(rng, NAMES[:size]) for _ in range(rng.randint(4, 14))]
        return cls(
            seed, size, rng.choice([0.001, 0.03, 0.15]), rng.random() < 0.3,
            tuple(sorted(troubles, key=lambda trouble: trouble.at_s)), averaging, interval_s,
        )  # fmt: skip


def _trouble(rng: random.Random, names: str) -> Trouble:
    action = rng.choice(ACTIONS)
    victims = "".join(sorted(rng.sample(names, len(names) // 2))) if action == "split" else rng.choice(names)
    amounts = {"break": (0.002, 0.03), "repeat": (0.01, 0.3), "delay": (0.05, 2.0),
               "narrow": (25e3, 1e6)}  # fmt: skip
    low, high = amounts.get(action, (0.0, 0.0))
    amount = low * (high / low) ** rng.random() if low else 0.0
    return Trouble(
        round(rng.uniform(0, STORM_S), 2), action, victims, round(rng.uniform(0.2, LONGEST_S), 2), round(amount, 4)
    )


def play(storm: Storm) -> Swarm:
    """Play a storm; then calm, and all must come to commit together.

    Raises AssertionError where the promise of the round protocol breaks, a peer ends, or the calm brings no peace.
    """
    played: list[Swarm] = []

    async def main() -> None:
        witness = Witness()
        run: RunConfig = dataclasses.replace(
            GOSSIP if storm.gossip else PLAIN, averaging=storm.averaging, sync_every=5 if storm.interval_s < 1 else 20
        )
        async with swarm(run, seed=storm.seed, latency_s=storm.latency_s, shapes=SHAPES) as s:
            played.append(s)
            weather = _Weather(s, storm, witness)
            for name in NAMES[: storm.size]:
                weather.start(name, founder=name == NAMES[0])
            await s.until(lambda: all(p.current.ready.is_set() for p in s.peers.values()))
            over = trio.current_time() + max((t.at_s + t.lasts_s for t in storm.troubles), default=0.0) + 0.3
            async with trio.open_nursery() as nursery:
                for trouble in storm.troubles:
                    nursery.start_soon(weather.strike, trouble)
                await s.until(lambda: trio.current_time() > over, within_s=math.inf)
            calm, count = trio.current_time(), len(s.peers)
            # Two rounds: the values of a round are checked if those of the one before are known.
            await s.until(
                lambda: all(
                    sum(r["t"] > calm and r["group_size"] == count for r in p.rounds()) >= 2 for p in s.peers.values()
                ),
                within_s=CALM_S,
            )
            assert len({p.current.driver.head.lineage for p in s.peers.values()}) == 1
            if not storm.gossip:
                assert witness.check_values() > 0

    try:
        run_virtual(main, storm.seed)
    except BaseExceptionGroup as group:
        raise _innermost(group) from None
    return played[0]


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Weather:
    """The faults that are under way."""

    def __init__(self, s: Swarm, storm: Storm, witness: Witness) -> None:
        self._swarm = s
        self._names = set(NAMES[: storm.size])
        self._step_s = storm.interval_s / s.run.sync_every
        self._rng = random.Random(f"weather/{storm.seed}")
        self._witness = witness
        self._restarts: Counter[str] = Counter()
        self._rough: list[Trouble] = []
        self._apart: list[Trouble] = []
        calm_s = s.network.latency_s
        s.network.fault = self._fault
        s.network.latency = lambda a, b: (
            calm_s
            + sum(self._rng.uniform(0, t.amount) for t in self._rough if t.action == "delay" and t.victims in (a, b))
        )

    def start(self, name: str, *, founder: bool = False) -> None:
        self._restarts[name] = 0
        self._witness.watch(self._swarm.start(name, founder=founder, step_s=self._step_s, restarts=True))

    async def strike(self, trouble: Trouble) -> None:
        """Do it when its time has come, and undo it when its time is over."""
        s = self._swarm
        await trio.sleep(trouble.at_s)
        match trouble.action:
            case "kill" | "leave":
                if trouble.victims in s.peers and self._leaves_the_state(without=trouble.victims):
                    if trouble.action == "leave":
                        s.peers[trouble.victims].current.leave("done")
                        await trio.sleep(0.2)
                    if trouble.victims in s.peers:
                        s.kill(trouble.victims)
                await trio.sleep(trouble.lasts_s)
                if trouble.victims not in s.peers:
                    self.start(trouble.victims)
            case "restart":
                peer = s.peers.get(trouble.victims)
                if peer is None or not peer.current.ready.is_set() or self._restarts[trouble.victims] == MOST_RESTARTS:
                    return
                # The next node has the state once the training goes on.
                if not peer.paused or self._leaves_the_state(without=trouble.victims):
                    self._restarts[trouble.victims] += 1
                    peer.current._fail(RuntimeError("a bug"))
            case "stop" | "freeze":
                peer = s.peers.get(trouble.victims)
                if peer is not None:
                    peer.paused = True
                    await self._hold(trouble, self._apart if trouble.action == "freeze" else [])
                    peer.paused = False
            case "split":
                await self._hold(trouble, self._apart)
            case "narrow":
                s.network.narrow(trouble.victims, trouble.amount)
                await trio.sleep(trouble.lasts_s)
                s.network.narrow(trouble.victims, None)
            case _:
                await self._hold(trouble, self._rough)

    async def _hold(self, trouble: Trouble, among: list[Trouble]) -> None:
        among.append(trouble)
        if self._leaves_the_state():
            self._swarm.network.partition(*self._sides())
            await trio.sleep(trouble.lasts_s)
        among.remove(trouble)
        self._swarm.network.partition(*self._sides())

    def _leaves_the_state(self, without: str = "") -> bool:
        """Whether on every side somebody has the run's state.

        Otherwise those that join there find nobody, and start the run anew, rightly: two starts stay apart.
        """
        peers = self._swarm.peers
        ready = {name for name, peer in peers.items() if name != without and peer.current.ready.is_set()}
        return all(ready.intersection(side) for side in self._sides() if self._names.intersection(side))

    def _sides(self) -> list[list[str]]:
        """Who is on the same side of every split is together."""
        sides: dict[tuple[bool, ...], list[str]] = {}
        for name in NAMES:
            sides.setdefault(tuple(name in trouble.victims for trouble in self._apart), []).append(name)
        return list(sides.values())

    def _fault(self, source: str, target: str, packet: bytes) -> PacketFault:
        for trouble in self._rough:
            if trouble.action == "delay" or trouble.victims not in (source, target):
                continue
            if self._rng.random() < trouble.amount:
                if trouble.action == "break":
                    return PacketFault.BREAK
                if packet[1] in CONTROL:
                    return PacketFault.DUPLICATE
        return PacketFault.NONE


# --- the shortest one ------------------------------------------------------------------------------------------------


def shortest(storm: Storm, fails: Callable[[Storm], bool]) -> Storm:
    """Leave out faults, halves first, for as long as it still fails without them."""
    size = max(1, len(storm.troubles) // 2)
    while True:
        start = 0
        while start < len(storm.troubles):
            fewer = dataclasses.replace(storm, troubles=storm.troubles[:start] + storm.troubles[start + size :])
            if fails(fewer):
                storm = fewer
            else:
                start += size
        if size == 1:
            return storm
        size //= 2


def weather(storm: Storm) -> Swarm:
    """Play a storm that must do no harm; where it does, say which seed and what was the least that did it."""
    try:
        return play(storm)
    except AssertionError as error:
        least = shortest(storm, _fails)
        pytest.fail(f"seed {storm.seed}: {error}\nthe shortest storm that fails:\nplay({least!r})")


def _fails(storm: Storm) -> bool:
    gc.collect()  # a storm that fails takes up to a gigabyte
    try:
        play(storm)
    except AssertionError:
        return True
    return False
