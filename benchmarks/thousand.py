"""`python -m benchmarks.thousand`: what the size of a swarm costs a peer, with real nodes in virtual time.

The model is tiny, so that what a peer spends on the others shows. The number of peers is the only thing that differs
between two swarms.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import trio

from benchmarks.machine import machine
from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.error_log import ErrorLog
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.memory_network.virtual_time import run_virtual
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.state_sync.transfer import ModelBuffers
from p2ptrain.protocol.wire.frames import PREFIX_BYTES
from p2ptrain.protocol.wire.messages import KIND_OF, KINDS, Answer
from p2ptrain.protocol.wire.transport import Inline, PeerId
from p2ptrain.settings.config import RunConfig

# As wide as a block, so that the model has 40 blocks.
SHAPES = [("embedding", (24, 64)), ("head", (16, 64))]
STEP_S = 1.0
RUN = RunConfig(run_id="large", sync_every=30, fragment_fraction=0.05, total_steps=0)
# All peers start within this time.
STARTS_S = 10.0
LATENCY_S = 0.02
# The connection of a peer to the others is looked at so often.
POLL_S = 0.5
# A peer's address and id, as long as those of real ones.
ID = "Qm{:044d}"


@dataclass
class Result:
    """What one swarm did.

    Attributes:
        discovered_s: from the last start until every peer had the state and could be reached from every other over
            links.
        rounds: committed while it was measured.
        behind: the most rounds that a peer was behind at any time after the first round.
        sent: bytes that a peer sent per step, on average over the peers, by kind of message.
        looked_up: bytes of directory records that a peer read per step, on average.
        most_sent: of the peer that sent most; `most_served`: by the peer that sent most in answer to requests.
        links: of a peer, on average; `most_links`: of the peer with most, at any time.
        peer_seconds: simulated in each second of CPU, while it was measured.
        node_bytes: of memory for each peer.
        replaced: peers that crashed, and gave way to a new one.
    """

    peers: int
    discovered_s: float = 0.0
    rounds: int = 0
    contributors: list[int] = field(default_factory=list)
    behind: int = 0
    sent: dict[str, float] = field(default_factory=dict)
    looked_up: float = 0.0
    most_sent: float = 0.0
    most_served: float = 0.0
    links: float = 0.0
    most_links: int = 0
    peer_seconds: float = 0.0
    node_bytes: float = 0.0
    replaced: int = 0

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a peer sent or looked up per step, on average."""
        return sum(self.sent.values()) + self.looked_up


class _Directory:
    """A directory that counts the bytes of the records that a peer reads."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, read: Counter[PeerId]) -> None:
        self._directory = network.directory(peer_id)
        self._peer_id, self._read = peer_id, read

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        return await self._directory.announce(key, value, expires_in_s)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        found = await self._directory.lookup(key)
        self._read[self._peer_id] += sum(len(peer) + len(value) for peer, value in found.items())
        return found


class _Peer:
    """One peer: a node, and training that only moves its weights."""

    def __init__(self, swarm: LargeSwarm, number: int, *, founder: bool) -> None:
        self.peer_id = ID.format(number)
        self.scope = trio.CancelScope()
        rng = random.Random(f"{swarm.seed}/{number}")
        generator = torch.Generator().manual_seed(number)
        self._tensors = [0.1 * torch.randn(shape, generator=generator) for _, shape in SHAPES]
        self._noise = [0.01 * torch.randn(shape, generator=generator) for _, shape in SHAPES]
        self._start_s = STEP_S * rng.random()
        self.exchange = Exchange(
            ParameterView(swarm.space, self._tensors), swarm.run, clock=trio.current_time, post=operator.call
        )
        log = EventLog(trio.current_time)

        def record(event: str, /, **fields: Any) -> None:
            log.write(event, **fields)
            if event == "round":
                swarm.note_round(self.peer_id, {"event": event, "t": trio.current_time(), **fields})

        network, transport = swarm.network, swarm.network.transport(self.peer_id)
        self.node = Node(
            RunSpec(swarm.run),
            NetworkAccess(transport, _Directory(network, self.peer_id, swarm.read), transport.bulk),
            LocalPolicy(),
            NodeStart(f"{self.peer_id}.0", rng, may_found=founder),
            exchange=self.exchange,
            buffers=ModelBuffers(bytes, lambda data: None, int),
            telemetry=Telemetry(record, log, ErrorLog(logging.getLogger(__name__))),
            compute=Inline(),
        )

    async def live(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.node.run_forever)
                while not self.node.ready.is_set():
                    self.exchange.idle()
                    await trio.sleep(0.1)
                await trio.sleep(self._start_s)
                while True:
                    for tensor, noise in zip(self._tensors, self._noise, strict=True):
                        tensor.mul_(0.998).add_(noise)
                    self.exchange.step(16)
                    await trio.sleep(STEP_S)


class LargeSwarm:
    """Starts, measures and replaces peers. Use `simulate`."""

    def __init__(self, peers: int, nursery: trio.Nursery, run: RunConfig, seed: int) -> None:
        self.seed = seed
        self.run = run
        self.result = Result(peers)
        self.network = MemoryNetwork(latency_s=LATENCY_S)
        self.network.fault = self._count
        self.space = IndexSpace(SHAPES)
        self.read: Counter[PeerId] = Counter()
        self.peers: dict[PeerId, _Peer] = {}
        self._sent: dict[PeerId, Counter[int]] = {}
        self._nursery = nursery
        self._audit = RunAudit()
        self._number = 0
        self._newest = -1

    def start(self) -> None:
        peer = _Peer(self, self._number, founder=self._number == 0)
        self._number += 1
        self.peers[peer.peer_id] = peer
        self._nursery.start_soon(peer.live)

    def kill(self, peer_id: PeerId) -> None:
        """Crash a peer."""
        self.network.crash(peer_id)
        self.peers.pop(peer_id).scope.cancel()

    def note_round(self, peer_id: PeerId, event: dict[str, Any]) -> None:
        """A peer's round has ended."""
        self._audit.note(peer_id, event)
        if event["status"] in ("committed", "solo") and event["round"] > self._newest:
            self._newest = event["round"]
            self.result.contributors.append(len(event["contributors"]))

    async def discover(self) -> None:
        """Start all peers, and wait until they have the state and reach each other over links."""
        for _ in range(self.result.peers):
            self.start()
            await trio.sleep(STARTS_S / self.result.peers)
        began_s = trio.current_time()
        while not self._is_connected():
            await trio.sleep(POLL_S)
        self.result.discovered_s = trio.current_time() - began_s

    async def measure(self, duration_s: float, churn_per_hour: float = 0.0) -> None:
        """Measure for so long, while this share of the peers is replaced in an hour."""
        result, began_s = self.result, trio.current_time()
        self._sent.clear()
        self.read.clear()
        result.contributors.clear()
        cpu_s, links, first = time.process_time(), [], self._newest
        rng = random.Random(f"churn/{self.seed}")
        per_s = churn_per_hour * result.peers / 3600
        next_s = began_s + rng.expovariate(per_s) if per_s else began_s + duration_s + 1
        while trio.current_time() < began_s + duration_s:
            await trio.sleep(POLL_S)
            while trio.current_time() >= next_s:
                self.kill(rng.choice(sorted(self.peers)))
                self.start()
                next_s += rng.expovariate(per_s)
                result.replaced += 1
            degrees = [len(peer.node.links.live) for peer in self.peers.values()]
            links.append(statistics.fmean(degrees))
            result.most_links = max(result.most_links, *degrees)
            if self._newest > first:
                result.behind = max(result.behind, self._newest - self._oldest())
            self._check()
        steps = duration_s / STEP_S
        result.rounds = self._newest - first
        result.links = statistics.fmean(links)
        result.peer_seconds = result.peers * duration_s / (time.process_time() - cpu_s)
        by_kind: Counter[int] = sum(self._sent.values(), Counter())
        result.sent = {KINDS[kind].__name__: size / steps / result.peers for kind, size in by_kind.most_common()}
        result.looked_up = self.read.total() / steps / result.peers
        result.most_sent = max(counter.total() for counter in self._sent.values()) / steps
        result.most_served = max(counter[KIND_OF[Answer]] for counter in self._sent.values()) / steps

    def _oldest(self) -> int:
        """The round of the peer that is furthest behind, of those that have the state."""
        return min(peer.node.driver.head.round for peer in self.peers.values() if peer.node.ready.is_set())

    def _check(self) -> None:
        assert not self._audit.disagreements, self._audit.disagreements
        lineages = Counter(p.node.driver.head.lineage for p in self.peers.values() if p.node.ready.is_set())
        assert len(lineages) == 1, f"the run has split: {lineages}"

    def _is_connected(self) -> bool:
        """Whether all peers have the state, and one can be reached from another over links."""
        peers = self.peers
        if not all(peer.node.ready.is_set() for peer in peers.values()):
            return False
        found, edge = {next(iter(peers))}, [next(iter(peers))]
        while edge:
            for peer_id in peers[edge.pop()].node.links.live:
                if peer_id in peers and peer_id not in found:
                    found.add(peer_id)
                    edge.append(peer_id)
        return len(found) == len(peers)

    def _count(self, source: PeerId, target: PeerId, packet: bytes) -> PacketFault:
        kind = packet[1] if len(packet) >= PREFIX_BYTES else 0
        self._sent.setdefault(source, Counter())[kind] += len(packet)
        return PacketFault.NONE


def simulate(
    peers: int, duration_s: float, *, churn_per_hour: float = 0.0, settle_s: float = 20.0, run: RunConfig = RUN,
    seed: int = 0, then: Callable[[LargeSwarm], Awaitable[None]] | None = None,
) -> Result:  # fmt: skip
    """Start a swarm, let it settle, and measure it.

    Args:
        duration_s: of virtual time, in which it is measured.
        churn_per_hour: share of the peers that crash in an hour, each replaced by a new one.
        settle_s: of virtual time between the discovery of all peers and the measurement.
        then: called at the end, with the swarm alive.
    """
    before = _resident_bytes()

    async def main() -> Result:
        async with trio.open_nursery() as nursery:
            swarm = LargeSwarm(peers, nursery, run, seed)
            await swarm.discover()
            await trio.sleep(settle_s)
            await swarm.measure(duration_s, churn_per_hour)
            swarm.result.node_bytes = (_resident_bytes() - before) / peers
            if then is not None:
                await then(swarm)
            nursery.cancel_scope.cancel()
        return swarm.result

    torch.set_num_threads(1)
    return run_virtual(main, seed)


def line(result: Result, first: Result) -> str:
    """One row of the table; `first` is the swarm that this one is compared with."""
    drawn = f"{min(result.contributors, default=0)} to {max(result.contributors, default=0)}"
    return (
        f"{result.peers:6} {result.discovered_s:10.1f} {result.bytes_per_step:11.0f} "
        f"{result.bytes_per_step / first.bytes_per_step - 1:+7.0%} {result.most_sent:9.0f} "
        f"{result.most_served:11.0f} {result.links:6.1f} "
        f"{result.most_links:6} {result.rounds:7} {drawn:>9} {result.behind:7} {result.replaced:9} "
        f"{result.node_bytes / 2**20:8.2f} {result.peer_seconds:8.0f}"
    )


HEADER = (
    f"{'peers':>6} {'found in s':>10} {'bytes/step':>11} {'':>7} {'most sent':>9} {'most served':>11} "
    f"{'links':>6} {'most':>6} {'rounds':>7} {'in each':>9} {'behind':>7} {'replaced':>9} {'MiB each':>8} "
    f"{'peer-s/s':>8}"
)


@click.command("python -m benchmarks.thousand")
@click.option("--peers", multiple=True, type=click.IntRange(2), default=(16, 64, 256, 1000), show_default=True)
@click.option("--seconds", default=120.0, show_default=True, help="Virtual seconds that are measured.")
@click.option("--settle", default=20.0, show_default=True, help="Virtual seconds before that, with all peers there.")
@click.option("--churn", default=0.1, show_default=True, help="Share of the peers that is replaced in an hour.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers to this.")
def main(peers: tuple[int, ...], seconds: float, settle: float, churn: float, json_file: Path | None) -> None:
    """Simulate swarms of these sizes one after the other. A thousand peers take half an hour of a core."""
    click.echo(", ".join(f"{name}: {value}" for name, value in machine().items()))
    click.echo(HEADER)
    results: list[Result] = []
    for size in peers:
        results.append(simulate(size, seconds, churn_per_hour=churn, settle_s=settle))
        click.echo(line(results[-1], results[0]))
        most = list(results[-1].sent.items())[:8]
        click.echo("       " + ", ".join(f"{kind} {size:.0f}" for kind, size in most))
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
