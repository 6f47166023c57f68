"""Nodes with real threads: a network thread, worker threads, and a thread for each model."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.error_log import ErrorLog
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.node.runner import NodeRunner
from p2ptrain.protocol.restarts import incarnation_of
from p2ptrain.protocol.rounds.landing import commit
from p2ptrain.protocol.rounds.moving import audit
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.state_sync.transfer import ModelBuffers
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import Shapes, load_no_buffers

# Large enough that codecs and plans go to the worker thread (gossip.INLINE_BLOCKS).
SHAPES: Shapes = [("embedding", (4096, 64)), ("bias", (70,))]
RUN = RunConfig(run_id="threads", sync_every=50, fragment_fraction=0.6, total_steps=0, audit_rate=1.0)


@pytest.fixture
def thread() -> Iterator[NetworkThread]:
    torch.set_num_threads(1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = NetworkThread()
    yield thread
    sys.setswitchinterval(before)
    assert thread.stop(10.0)


class NotingWorkers(Workers):
    """Worker threads; notes the names of those that were used."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.names: set[str] = set()

    async def __call__(self, work: Callable[..., Any], /, *args: Any) -> Any:
        def worked() -> Any:
            self.names.add(threading.current_thread().name)
            return work(*args)

        return await super().__call__(worked)


class ThreadedPeer:
    """A model that trains in its own thread, and a node on the network thread."""

    def __init__(
        self, network: MemoryNetwork, thread: NetworkThread, name: str, *, founder: bool, workers: int
    ) -> None:
        generator = torch.Generator().manual_seed(ord(name))
        self.name = name
        self.tensors = [0.1 * torch.randn(shape, generator=generator) for _, shape in SHAPES]
        self.events: list[dict[str, Any]] = []
        self.told_in: set[str] = set()
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.exchange = Exchange(
            ParameterView(IndexSpace(SHAPES), self.tensors), RUN, clock=time.monotonic, post=thread.post
        )
        self.workers, transport = NotingWorkers(workers), network.transport(name)
        self.computed_in = self.workers.names

        def record(event: str, /, **fields: object) -> None:
            self.told_in.add(threading.current_thread().name)
            self.events.append({"event": event, **fields})

        def build(may_found: bool, restored: Restored | None, number: int) -> Node:
            return Node(
                RunSpec(RUN),
                NetworkAccess(transport, network.directory(name), transport.bulk),
                LocalPolicy(),
                NodeStart(incarnation_of(f"{name}.1", number), random.Random(name), may_found, restored),
                exchange=self.exchange,
                buffers=ModelBuffers(bytes, load_no_buffers, int),
                telemetry=Telemetry(record, EventLog(time.time), ErrorLog(logging.getLogger(__name__))),
                compute=self.workers,
            )

        self.runner = NodeRunner(build, self.exchange, self.workers, may_found=founder, restored=None)
        thread.start_soon(self.runner.run_forever)
        self._trainer = threading.Thread(target=self._train, name=f"training {name}")
        self._trainer.start()

    def _train(self) -> None:
        try:
            while not self.done.is_set():
                if self.runner.last_ready.ready.is_set():
                    for tensor in self.tensors:
                        tensor.mul_(0.999)
                    self.exchange.step(16)
                else:
                    self.exchange.idle()
                self.done.wait(0.002)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.done.set()
        self._trainer.join()
        assert self.error is None

    def rounds(self, size: int) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == "round" and e["group_size"] == size]


def wait_until(condition: Callable[[], object], *peers: ThreadedPeer) -> None:
    """Wait; the test's own time limit is the deadline."""
    while not condition():
        assert [peer.error for peer in peers] == [None] * len(peers)
        assert [peer.runner.failure for peer in peers] == [None] * len(peers)
        time.sleep(0.01)


def note_threads(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> set[str]:
    """The names of the threads that call this function."""
    work, threads = getattr(module, name), set[str]()

    def noting(*args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return work(*args)

    monkeypatch.setattr(module, name, noting)
    return threads


@pytest.mark.parametrize("workers", [(1, 1), (1, 4)], ids=str)
def test_rounds_and_fragments_between_real_threads_and_over_a_node_that_fails(
    thread: NetworkThread, monkeypatch: pytest.MonkeyPatch, workers: tuple[int, int]
) -> None:
    heavy = [
        note_threads(monkeypatch, module, name) for module, name in ((audit, "_copy_of"), (commit, "release_pages"))
    ]
    network = MemoryNetwork()
    a, b = peers = [
        ThreadedPeer(network, thread, name, founder=name == "a", workers=count)
        for name, count in zip("ab", workers, strict=True)
    ]
    try:
        wait_until(lambda: len(a.rounds(2)) >= 3 and len(b.rounds(2)) >= 3, *peers)
        # Fragments come; on a busy machine most are too old by then.
        wait_until(
            lambda: all(
                any(e["event"] == "fragments" and (e["merged"] or e["skipped"]) for e in list(peer.events))
                for peer in peers
            ),
            *peers,
        )
        by_round = {(r["lineage"], r["round"]): r["state_hash"] for r in a.rounds(2)}
        shared = [
            (r["state_hash"], by_round[key]) for r in b.rounds(2) if (key := (r["lineage"], r["round"])) in by_round
        ]
        assert len(shared) >= 2
        assert all(ours == theirs for ours, theirs in shared)
        assert all(peer.computed_in and "p2ptrain-network" not in peer.computed_in for peer in peers)
        assert all(threads and threads <= a.computed_in | b.computed_in for threads in heavy)
        assert all(peer.told_in == {"p2ptrain-network"} for peer in peers)

        # The node of one fails; its training thread does not notice.
        node, steps, rounds = b.runner.node, b.exchange.steps, len(a.rounds(2))
        thread.post(lambda: node._fail(ZeroDivisionError("a bug")))
        wait_until(lambda: b.runner.node is not node and b.runner.node.ready.is_set(), *peers)
        wait_until(lambda: len(a.rounds(2)) > rounds and b.exchange.steps > steps, *peers)
    finally:
        for peer in peers:
            peer.stop()
            thread.post(peer.workers.close)
    assert thread.failure is None
