"""`make hostile`: the attacks against real `p2ptrain join` processes on this machine, and a table of what they cost.

Each attack comes from a stranger with an identity of its own, over libp2p. Beforehand and meanwhile the steps and the
CPU seconds of the victims are counted, over windows of `WINDOW_S` in the same run; their training is paced so that two
cores are enough. Members who lie are in the tests on the memory network: `tests/hostile/test_attacks.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import trio

from benchmarks.paced import STEP_VARIABLE
from p2ptrain.network.host import open_network
from p2ptrain.network.thread import NetworkThread
from p2ptrain.protocol.membership.lookup import ask_settings
from p2ptrain.protocol.wire.messages import SignedHead, unpack
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.peer_config import NetworkConfig
from tests.hostile.attacks import ATTACKS, Attack, Known, take_over
from tests.hostile.liar import Liar, stranger
from tests.swarm.processes import Process, Swarm, assert_anchors_agree

RUN = "hostile"
STEP_S, SYNC_EVERY = 0.05, 60
INTERVAL_S = STEP_S * SYNC_EVERY
# Long enough that one pause of a busy machine is no fifth of it.
WINDOW_S = 12.0
LEAST_SPEED = 0.8
# Of one core, by a victim and its daemon. The speed alone also falls because the liar takes the cores of its victims.
MOST_MORE_CORES = 0.25
MOST_GROWTH_BYTES = 50_000_000
FOUND = (
    f"p2ptrain join --run-id {RUN} --model benchmarks.paced:evenly --steps 0 --sync-every {SYNC_EVERY} "
    "--fragment-fraction 0.02 --eval-every 100000"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one attack cost.

    Attributes:
        speed: of the slowest victim, as a fraction of its speed before.
        more_cores: the CPU seconds a second that one victim and its daemon took more than before, at most.
        grown_bytes: by how much one victim and its daemon grew, at most.
        round_s: from its end to a round of all.
    """

    name: str
    frames: int
    speed: float
    more_cores: float
    grown_bytes: int
    round_s: float
    log_lines: int

    @property
    def failures(self) -> list[str]:
        found = []
        if self.speed < LEAST_SPEED:
            found.append(f"{self.speed:.0%} of the speed")
        if self.more_cores > MOST_MORE_CORES:
            found.append(f"{self.more_cores:.2f} more of a core")
        if self.grown_bytes > MOST_GROWTH_BYTES:
            found.append(f"{self.grown_bytes / 1e6:.0f} MB more")
        if self.round_s > 3 * INTERVAL_S:
            found.append(f"a round after {self.round_s:.0f} s")
        return found


def steps_of(peer: Process) -> int:
    return int(max((event["step"] for event in peer.events("step")), default=0))


def with_daemon(peer: Process) -> list[psutil.Process]:
    process = psutil.Process(peer.pid)
    return [process, *process.children(recursive=True)]


def memory_of(peer: Process) -> int:
    return sum(process.memory_info().rss for process in with_daemon(peer))


@dataclasses.dataclass(frozen=True)
class Count:
    """What a victim had done at one time."""

    steps: int
    cpu_s: float
    at_s: float

    @classmethod
    def of(cls, peer: Process) -> Count:
        """What it has done until now."""
        times = [process.cpu_times() for process in with_daemon(peer)]
        return cls(steps_of(peer), sum(used.user + used.system for used in times), time.monotonic())

    def rates_since(self, before: Count) -> tuple[float, float]:
        """Steps, and CPU seconds, per second."""
        seconds = self.at_s - before.at_s
        return (self.steps - before.steps) / seconds, (self.cpu_s - before.cpu_s) / seconds


def alive(swarm: Swarm, peers: Sequence[Process]) -> None:
    assert all(peer.running for peer in peers), swarm.report()


async def known(liar: Liar, run: RunConfig, victims: Sequence[str]) -> Known:
    """What the first victim tells anybody who asks for its head."""
    link = await liar.links.connect(victims[0], [])
    payload = b""
    while not payload:  # none between the commit of a round and the signatures under it
        await trio.sleep(0.2)
        _, payload = await liar.links.request(link, "head", timeout_s=15)
    signed = unpack(SignedHead, payload)
    assert signed.head.record is not None
    return Known(run, signed.head.record.parts[-1].stop, signed.head, signed.genesis)


async def lie(attack: Attack, initial: tuple[str, ...], victims: Sequence[str]) -> int:
    """Attack for a window as one new identity. Returns how many frames went out."""
    config = NetworkConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=initial)
    async with open_network(config) as network, trio.open_nursery() as nursery:
        run = await ask_settings(network.transport, network.directory, RUN, rng=random.Random(), timeout_s=20)
        assert run is not None
        liar = await stranger(nursery, network.transport, run.run_id, run.digest)
        learnt = await known(liar, run, victims)
        if attack.takes_over:
            take_over(liar, learnt)
        frames = attack.frames(liar, learnt)
        with trio.move_on_after(WINDOW_S):
            while True:
                frame = next(frames)
                for victim in victims:
                    await liar.tell(victim, *frame)
                await trio.sleep(attack.every_s)
        nursery.cancel_scope.cancel()
    return liar.sent


def attack_once(name: str, swarm: Swarm, peers: Sequence[Process]) -> Row:
    """Measure a window before the attack and one with it, then wait for a round after it."""
    initial = tuple(peers[0].addresses.read_text().split())
    victims = [peer.peer_id for peer in peers]

    def rates(began: Sequence[Count]) -> list[tuple[float, float]]:
        return [Count.of(peer).rates_since(count) for peer, count in zip(peers, began, strict=True)]

    counts = [Count.of(peer) for peer in peers]
    time.sleep(WINDOW_S)
    before = rates(counts)
    sizes = [memory_of(peer) for peer in peers]
    lines = sum(peer.errors.count("\n") for peer in peers)
    thread = NetworkThread()
    try:
        counts = [Count.of(peer) for peer in peers]
        sent = thread.run(lie, ATTACKS[name], initial, victims, timeout_s=10 * WINDOW_S)
        during = rates(counts)
    finally:
        thread.stop(WINDOW_S)
    alive(swarm, peers)
    rounds, gone_s = [peer.rounds(by=len(peers))[-1]["round"] for peer in peers], time.monotonic()
    swarm.until(lambda: all(p.rounds(r + 1, by=len(peers)) for p, r in zip(peers, rounds, strict=True)))
    round_s = time.monotonic() - gone_s
    assert_anchors_agree(*peers)
    grown = max(memory_of(peer) - size for peer, size in zip(peers, sizes, strict=True))
    slowest = min(now / then for (now, _), (then, _) in zip(during, before, strict=True))
    more_cores = max(now - then for (_, now), (_, then) in zip(during, before, strict=True))
    return Row(name, sent, slowest, more_cores, grown, round_s, sum(p.errors.count("\n") for p in peers) - lines)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| attack | frames sent | speed | cores | memory | round after | log lines |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.frames} | {r.speed:.0%} | {r.more_cores:+.2f} | {r.grown_bytes / 1e6:+.0f} MB | "
        f"{r.round_s:.1f} s | {r.log_lines} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks with this in their names")
    names = [name for name in ATTACKS if parser.parse_args().only in name]
    os.environ[STEP_VARIABLE] = str(STEP_S)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp") as directory:
        (Path(directory) / "s").mkdir()
        swarm = Swarm(Path(directory), Path(directory) / "s")
        try:
            founder = swarm.start(FOUND)
            swarm.until_ready(founder)
            joining = (
                f"p2ptrain join --run-id {RUN} --model benchmarks.paced:evenly --initial-peers {founder.addresses}"
            )
            peers = [founder, *(swarm.start(joining) for _ in range(2))]
            swarm.until(lambda: all(len(peer.rounds(by=3)) >= 2 for peer in peers))
            print(f"three peers train, {1 / STEP_S:.0f} steps a second, a round every {INTERVAL_S:.0f} s", flush=True)
            for number, name in enumerate(names, start=1):
                rows.append(attack_once(name, swarm, peers))
                print(f"{number} of {len(names)}: {name}: {', '.join(rows[-1].failures) or 'harmless'}", flush=True)
        finally:
            swarm.close()
    print(table(rows))
    if any(row.failures for row in rows):
        sys.exit("not harmless")


if __name__ == "__main__":
    main()
