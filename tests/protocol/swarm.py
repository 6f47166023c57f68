"""Test harness: real nodes on the memory network and virtual time, each training a tiny model.

Training is a random walk with drift towards a common target: no loss function is needed to see whether what rounds
commit is the weighted mean of what their contributors brought.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import trio
import trio.testing

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.algorithms.outer import outer_step
from p2ptrain.algorithms.transfers import in_pieces
from p2ptrain.error_log import ErrorLog
from p2ptrain.memory_network import MemoryNetwork, PacketFault, virtual_time
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.peer.device_transfers import device_transfers
from p2ptrain.peer.side_stream import SideStream
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import ExchangeEvent, RoundReport, SnapshotTaken, StepReport
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.node.runner import NodeRunner
from p2ptrain.protocol.restarts import incarnation_of
from p2ptrain.protocol.rounds.deciding.history import History
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.transfer import ModelBuffers
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import KIND_OF, Record
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.run_key import RunKey

Shapes = list[tuple[str, tuple[int, ...]]]
SHAPES: Shapes = [("embedding", (40, 64)), ("bias", (70,)), ("head", (2100, 64))]


@dataclass
class Worker:
    """Does work in the task that asks for it, and says that it has so many threads. Each piece takes `work_s`."""

    threads: int = 1
    work_s: float = 0.0

    async def __call__(self, work: Callable[..., Any], /, *args: Any) -> Any:
        if self.work_s:
            with trio.CancelScope(shield=True):  # a thread cannot be cancelled
                await trio.sleep(self.work_s)
        await trio.lowlevel.checkpoint()
        return work(*args)


inline = Worker()


def load_no_buffers(data: bytes) -> None:
    assert data == b""


@functools.lru_cache(maxsize=16)  # the peers of one test after the other draw the same
def _noise(seed: int, shapes: tuple[torch.Size, ...]) -> list[list[torch.Tensor]]:
    """Five changes of the weights, of which each step of training makes one."""
    generator = torch.Generator().manual_seed(seed)
    return [[0.01 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]


@dataclass
class TestPeer:
    """One peer: its weights, its node, and everything that it recorded. `on_node` is told of each later node."""

    __test__ = False

    peer_id: str
    tensors: list[torch.Tensor]
    exchange: Exchange
    node: Node
    step_s: float
    rng: random.Random
    events: list[dict[str, Any]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    paused: bool = False
    error: BaseException | None = None
    runner: NodeRunner | None = None
    on_node: Callable[[Node], None] = lambda _: None

    @property
    def current(self) -> Node:
        """The node that runs now, where a runner keeps one."""
        return self.node if self.runner is None else self.runner.node

    def rounds(self, *statuses: str) -> list[dict[str, Any]]:
        wanted = statuses or ("committed", "solo")
        return [e for e in self.events if e["event"] == "round" and e["status"] in wanted]

    def flat(self) -> torch.Tensor:
        out = torch.zeros((self.exchange.space.num_blocks, 64))
        self.exchange.view.read(out)
        return out

    async def train(self) -> None:
        while not self.current.ready.is_set():
            self.exchange.idle()
            await trio.sleep(0.05)
        changes = _noise(self.rng.randrange(2**31), tuple(tensor.shape for tensor in self.tensors))
        while True:
            await trio.sleep(self.step_s)
            if self.paused:
                continue
            if self.exchange.finished or self.exchange.at_length:
                self.exchange.idle()
                continue
            torch._foreach_mul_(self.tensors, 0.998)
            torch._foreach_add_(self.tensors, self.rng.choice(changes))
            self.reports.append(self.exchange.step(16))

    async def run(self) -> None:
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.train)
                    if self.runner is None:
                        await self.node.run_forever()
                    else:
                        await self.runner.run_forever()
        except* Exception as error:
            self.error = error


class Swarm:
    """Starts, kills and inspects peers."""

    def __init__(
        self, network: MemoryNetwork, nursery: trio.Nursery, run: RunConfig, seed: int, shapes: Shapes = SHAPES
    ) -> None:
        self.network = network
        self.run = run
        self.shapes = shapes
        self.peers: dict[str, TestPeer] = {}
        self.dead: list[TestPeer] = []
        self.run_audit = RunAudit()
        # What a visit to the worker thread takes.
        self.worker = Worker()
        # Of peers that train on a device, the stream beside training.
        self.sides: Mapping[str, SideStream] = {}
        self.devices_fail = False
        # Whether all peers begin with the same weights.
        self.same_weights = False
        self._nursery = nursery
        self._rng = random.Random(seed)
        self._incarnations = 0

    def start(
        self, peer_id: str, *, founder: bool = False, step_s: float = 0.1, restored: Restored | None = None,
        run: RunConfig | None = None, restarts: bool = False, key: RunKey | None = None, chosen: Collection[str] = (),
        remembered: Collection[str] = (), tokenizer: bytes = b"",
    ) -> TestPeer:  # fmt: skip
        """Put a peer into the swarm; `restarts` as a `NodeRunner` keeps it, so that its errors are not the test's.

        `key`: of a closed run.
        """
        seed = self._rng.randrange(2**31)
        generator = torch.Generator().manual_seed(0 if self.same_weights else seed)
        tensors = [0.1 * torch.randn(shape, generator=generator) for _, shape in self.shapes]
        run = run or self.run
        rng = random.Random(self._rng.randrange(2**31))
        view, side = ParameterView(IndexSpace(self.shapes), tensors), self.sides.get(peer_id)
        exchange = Exchange(
            view, run, transfers=device_transfers(view, side) if side else in_pieces(view), clock=trio.current_time,
            post=lambda work: work(),
        )  # fmt: skip
        self._incarnations += 1
        incarnation = f"{peer_id}.{self._incarnations}"
        transport = self.network.transport(peer_id)
        events: list[dict[str, Any]] = []

        event_log = EventLog(trio.current_time)

        def record(event: str, /, **fields: object) -> None:
            event_log.write(event, **fields)
            events.append({"event": event, "t": trio.current_time(), **fields})
            self.run_audit.note(peer_id, events[-1])

        def build(may_found: bool, restored: Restored | None, number: int) -> Node:
            closed = None if key is None else ClosedRun(key, run.run_id, rng.randbytes)
            node = Node(
                RunSpec(run, tokenizer, closed),
                NetworkAccess(transport, self.network.directory(peer_id), transport.bulk),
                LocalPolicy(chosen=chosen, remembered=remembered),
                NodeStart(incarnation_of(incarnation, number), rng, may_found, restored),
                exchange=exchange,
                buffers=ModelBuffers(bytes, load_no_buffers, int),
                telemetry=Telemetry(record, event_log, ErrorLog(logging.getLogger(__name__))),
                compute=self.worker,
            )
            if number:
                peer.on_node(node)
            return node

        if restarts:
            runner = NodeRunner(build, exchange, self.worker, may_found=founder, restored=restored)
            peer = TestPeer(peer_id, tensors, exchange, runner.node, step_s, rng, events, runner=runner)
        else:
            peer = TestPeer(peer_id, tensors, exchange, build(founder, restored, 0), step_s, rng, events)
        self.peers[peer_id] = peer
        self._nursery.start_soon(peer.run)
        return peer

    def kill(self, peer_id: str) -> TestPeer:
        peer = self.peers.pop(peer_id)
        self.network.crash(peer_id)
        peer.scope.cancel()
        self.dead.append(peer)
        return peer

    def check(self) -> None:
        """The invariant holds so far, and no peer has ended."""
        assert not self.run_audit.disagreements, self.run_audit.disagreements
        errors = {peer.peer_id: peer.error for peer in [*self.peers.values(), *self.dead] if peer.error is not None}
        assert not errors, errors

    def check_contained(self) -> None:
        """No step has contained an error."""
        failed = {p.peer_id for p in [*self.peers.values(), *self.dead] for r in p.reports if "failed" in r.skipped}
        assert self.devices_fail or not failed, f"errors while fragments were merged at {failed}: see the log"

    async def until_joined(self, *names: str, within_s: float = 300.0) -> None:
        """Let virtual time pass until these peers have joined; all of the swarm, if none is named."""
        await self.until(lambda: all(self.peers[n].node.ready.is_set() for n in names or self.peers), within_s=within_s)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 300.0) -> None:
        """Let virtual time pass until the condition holds; checks the promise meanwhile."""
        with trio.move_on_after(within_s):
            while not condition():
                self.check()
                await trio.sleep(0.05)
            return
        lines = [
            f"{p.peer_id}: {p.current.status}, head {p.current.driver.head.lineage}/{p.current.driver.head.round}, "
            f"linked {sorted(p.current.links.live)}"
            for p in self.peers.values()
        ]
        raise AssertionError("did not happen within {:.0f} s\n{}".format(within_s, "\n".join(lines)))


# The momentum of the baseline: its digest, and so who leads and what is drawn, does not follow our defaults.
RUN = RunConfig(run_id="test", sync_every=20, fragment_fraction=0.02, total_steps=0, outer_momentum=0.9)


@asynccontextmanager
async def swarm(
    run: RunConfig = RUN, *, seed: int = 0, shapes: Shapes = SHAPES, **weather: float
) -> AsyncIterator[Swarm]:
    """A swarm on a fresh network; checks the promise of the round protocol as it runs, and at the end."""
    async with trio.open_nursery() as nursery:
        members = Swarm(MemoryNetwork(**weather), nursery, run, seed, shapes)
        yield members
        nursery.cancel_scope.cancel()
    members.check()
    members.check_contained()


def run_virtual(test: Callable[[], Any], seed: int = 0) -> None:
    """Run a trio test on virtual time, the same way every time."""
    torch.set_num_threads(1)
    virtual_time.run_virtual(test, seed)


class Witness:
    """Notes every snapshot and every anchor of a swarm, to compare what was committed with what it should be."""

    def __init__(self) -> None:
        # By lineage, round and incarnation. After a round that was skipped there may be a second one.
        self.snapshots: dict[tuple[str, int, str], list[np.ndarray]] = defaultdict(list)
        self.anchors: dict[tuple[str, int, str], np.ndarray] = {}
        self.momenta: dict[tuple[str, int], np.ndarray] = {}
        self.records: dict[tuple[str, int], Record] = {}

    def watch(self, peer: TestPeer) -> None:
        self._watch(peer, peer.current)
        peer.on_node = lambda node: self._watch(peer, node)

    def _watch(self, peer: TestPeer, node: Node) -> None:
        receive, ended = node.receive, node.round_ended

        def watched(event: ExchangeEvent) -> None:
            if isinstance(event, SnapshotTaken):
                snapshot = event.snapshot
                key = (snapshot.epoch.lineage, snapshot.epoch.round + 1, node.incarnation)
                self.snapshots[key].append(snapshot.weights.numpy().copy())
            receive(event)

        def round_ended(report: RoundReport) -> None:
            record = node.driver.head.record
            if report.status != "skipped" and record is not None:
                self.anchors[(report.lineage, report.round, peer.peer_id)] = node.state.anchor.copy()
                if node.state.moments:
                    self.momenta[(report.lineage, report.round)] = node.state.moments[0].copy()
                self.records[(report.lineage, report.round)] = record
            ended(report)

        node.receive = watched  # type: ignore[method-assign]
        node.round_ended = round_ended  # type: ignore[method-assign]

    def check_values(self) -> int:
        """Every anchor is the outer step of exactly its contributors' weighted mean; returns how many were checked.

        Blocks that a record does not average have not changed.
        """
        checked = 0
        for (lineage, round_, peer_id), anchor in self.anchors.items():
            record = self.records[(lineage, round_)]
            before = self.anchors.get((lineage, round_ - 1, peer_id))
            momentum = self.momenta.get((lineage, round_ - 1))
            taken = [self.snapshots[(lineage, round_, c.incarnation)] for c in record.contributors]
            if before is None or momentum is None or any(len(snapshots) != 1 for snapshots in taken):
                continue
            total = sum(c.weight for c in record.contributors)
            averaged = slice(record.parts[0].start, record.parts[-1].stop)
            mean = sum(
                np.float64(c.weight / total) * (before[averaged] - snapshot).astype(np.float64)
                for c, (snapshot,) in zip(record.contributors, taken, strict=True)
            ).astype(np.float32)
            expected, momentum = before.copy(), momentum.copy()
            outer_step(
                record.outer_optimizer,
                expected[averaged],
                [momentum[averaged]],
                mean,
                lr=record.outer_lr,
                momentum=record.outer_momentum,
                round_=0,
            )  # fmt: skip
            size = max(1.0, float(np.abs(before).max()))  # what rounding errors grow with
            np.testing.assert_allclose(anchor, expected, rtol=1e-6, atol=2e-6 * size)
            checked += 1
        return checked


def start_all(s: Swarm, names: str, witness: Witness | None = None, step_s: float = 0.1) -> None:
    for i, name in enumerate(names):
        peer = s.start(name, founder=i == 0, step_s=step_s)
        if witness is not None:
            witness.watch(peer)


def common(s: Swarm, count: int, size: int) -> bool:
    """Whether every peer has taken part in `count` rounds of `size` contributors."""
    return all(sum(r["group_size"] >= size for r in p.rounds("committed")) >= count for p in s.peers.values())


def when(
    s: Swarm, kind: type[messages.Message], occurrence: int, action: Callable[[str, str], PacketFault]
) -> Callable[[], bool]:
    """Do something at the n-th message of a kind from now on. Returns whether it has happened."""
    seen = 0
    done = False

    def fault(source: str, target: str, packet: bytes) -> PacketFault:
        nonlocal seen, done
        if done or kind_of(packet) != KIND_OF[kind]:
            return PacketFault.NONE
        seen += 1
        if seen < occurrence:
            return PacketFault.NONE
        done = True
        return action(source, target)

    s.network.fault = fault
    return lambda: done


def after(s: Swarm, time_s: float, size: int) -> bool:
    """Whether every peer has landed a round of `size` since then."""
    return all(
        any(r["t"] > time_s and r["group_size"] == size for r in p.rounds("committed")) for p in s.peers.values()
    )


def kind_of(packet: bytes) -> int:
    """The number of a packet's message kind."""
    return packet[1]


def checkpoint_of(s: Swarm, name: str) -> Restored:
    """What a peer would save now."""
    node, exchange = s.peers[name].node, s.peers[name].exchange
    state = exchange.new_state()
    state.copy_from(node.state)
    history = History(node.driver.history.genesis, node.driver.history.entries)
    return Restored(state, node.driver.head, exchange.run_step, history, exchange.tokens)
