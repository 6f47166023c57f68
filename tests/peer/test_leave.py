"""Leaving a run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from p2ptrain.algorithms import indexspace
from p2ptrain.algorithms.indexspace import ParameterView
from p2ptrain.algorithms.transfers import Transfers
from p2ptrain.errors import ConfigError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer import network_side
from p2ptrain.peer.device_transfers import device_transfers
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.sinks import Sink, Sinks
from p2ptrain.protocol.exchange import slices
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import SnapshotWanted
from p2ptrain.protocol.node.node import Node
from p2ptrain.settings.config import RunConfig
from tests.peer.pair import memory_peer
from tests.protocol.exchange.test_exchange import landing
from tests.side_stream import LateStream


def peer_of(thread: NetworkThread, records: Sink, *, may_found: bool = True) -> Peer:
    parts, run = ModelParts(torch.nn.Linear(4, 4)), RunConfig(run_id="test")
    return memory_peer(parts, run, "a", MemoryNetwork(), thread, may_found=may_found, records=records)


@pytest.mark.parametrize("finished", [True, False])
def test_who_has_landed_the_last_round_stays_for_others_before_it_leaves(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = NetworkThread()
    others = set(threading.enumerate())
    try:
        peer = peer_of(thread, Sinks([]))
        workers = [t for t in set(threading.enumerate()) - others if t.name.startswith("p2ptrain-worker-")]
        assert len(workers) == 2
        behind = SimpleNamespace(peer_id="b", is_in_use=False)
        node, seen, awaited = peer._runner.node, list[str](), [[behind], [behind], []]
        leave = node.leave

        def note_behind(round_: int) -> list[SimpleNamespace]:
            seen.append("awaited")
            return awaited.pop(0)

        def note_leave(reason: str) -> None:
            seen.append("left")
            leave(reason)

        monkeypatch.setattr(node.driver.context.liveness, "behind", note_behind)
        monkeypatch.setattr(node, "leave", note_leave)
        peer._exchange.finished = finished
        peer.leave()
        assert seen == (["awaited"] * 3 if finished else []) + ["left"]
        for worker in workers:
            worker.join()
    finally:
        assert thread.stop(10.0)


@pytest.mark.parametrize(
    ("used_s", "has_contributed", "stays_s"),
    [(0.0, True, 10.0), (25.0, True, 35.0), (1e9, True, 60.0), (1e9, False, 10.0)],
)
def test_it_stays_while_others_fetch_the_last_round(
    used_s: float, has_contributed: bool, stays_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds after the last use of its links by one that has contributed, and as long as an attempt at most."""

    class Behind:
        peer_id = "b"

        @property
        def is_in_use(self) -> bool:
            return trio.current_time() < began_s + used_s

    liveness = SimpleNamespace(behind=lambda round_: [Behind()])
    recent = SimpleNamespace(admits=lambda peer_id: has_contributed)
    context = SimpleNamespace(liveness=liveness, recent=recent, timeouts=SimpleNamespace(attempt_s=lambda: 60.0))
    node = Node.__new__(Node)
    driver: Any = SimpleNamespace(context=context, head=SimpleNamespace(round=3))
    node.driver, node.run = driver, RunConfig()
    monkeypatch.setattr(Node, "lineage_peers", lambda node: ["b"])
    node.membership = SimpleNamespace(is_large=False)  # type: ignore[assignment]

    async def stay() -> float:
        nonlocal began_s
        began_s = trio.current_time()
        await node.stay()
        return trio.current_time() - began_s

    began_s = 0.0
    assert trio.run(stay, clock=MockClock(autojump_threshold=0)) == pytest.approx(stays_s, abs=0.2)


def test_who_stopped_before_the_last_round_makes_up_for_it() -> None:
    network, thread = MemoryNetwork(), NetworkThread()
    run = RunConfig(run_id="test", total_steps=4, sync_every=4)
    try:
        state: dict[str, Any] | None = None
        for waits in (False, True):
            parts = ModelParts(torch.nn.Linear(4, 4))
            peer = memory_peer(parts, run, "a", network, thread, may_found=True, resume_state=state)
            assert (peer.finished, peer.run_step) == (False, 4 if waits else 0)
            assert peer.wait_finished() if waits else not peer.wait_finished(0)
            state = peer.state_dict() | {"run_step": 4}
            peer.leave()
    finally:
        assert thread.stop(10.0)


@pytest.mark.parametrize("end", ["state_dict", "leave", "leave without landing"])
def test_a_round_that_has_landed_in_part_lands_whole_before_a_checkpoint_and_when_leaving(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexspace, "_PIECE_VALUES", 4)
    monkeypatch.setattr(slices, "SHARE", 0.0)
    monkeypatch.setattr(slices, "LEAST_S", 0.0)
    thread = NetworkThread()
    try:
        peer = peer_of(thread, Sinks([]))
        exchange, parts = peer._exchange, peer._parts
        before = [tensor.clone() for tensor in parts.tensors]
        buffer = exchange.new_buffer().fill_(1.0)
        exchange.land(landing(kind="add", buffer=buffer, epoch=exchange.epoch))
        peer.step()
        changed = sum(int((now != then).sum()) for now, then in zip(parts.tensors, before, strict=True))
        assert (changed, exchange.landing_pending) == (4, True)
        if end == "state_dict":
            peer.state_dict()
        else:
            peer.leave(landing=end == "leave")
        assert not exchange.landing_pending
        assert all(torch.equal(now, then + 1) for now, then in zip(parts.tensors, before, strict=True))
        peer.leave()
    finally:
        assert thread.stop(10.0)


class Records:
    """A sink that notes what it is told."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def write(self, event: str, /, **fields: Any) -> None:
        self._seen.append(event)

    def close(self) -> None:
        self._seen.append("closed")


class Faulty(LateStream):
    """A device that hangs, and one whose every call fails once `broken` is set, as after a failed assertion in it."""

    def __init__(self) -> None:
        super().__init__(lambda: 10**9)
        self.broken = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        queued, stream = super().run(*args, **kwargs), self

        class Pending:
            @property
            def done(self) -> bool:
                if stream.broken:
                    raise RuntimeError("CUDA error: device-side assert triggered")
                return queued.done

            def wait(self) -> None:
                assert self.done

        return Pending()


@pytest.mark.parametrize("broken", [True, False])
def test_a_faulty_device_does_not_prevent_leaving(
    broken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The transfers of a peer end in an error, or never, when its loop raises. It leaves, and that error is raised."""

    def transfers(parts: ModelParts) -> Transfers:
        assert isinstance(parts.view, ParameterView)
        return device_transfers(parts.view, side)

    monkeypatch.setattr(network_side, "TRANSFERS_S", 0.05)
    monkeypatch.setattr(ModelParts, "transfers", transfers)
    thread, side, seen = NetworkThread(), Faulty(), list[str]()
    try:
        with pytest.raises(KeyError, match="of the loop"), peer_of(thread, Records(seen)) as peer:
            peer.on_leave(lambda: seen.append("network closed"))
            peer._exchange.want_snapshot(SnapshotWanted(peer._exchange.new_buffer(), latest_s=0.0))
            peer.step()
            assert side.queued == 1
            side.broken = broken
            raise KeyError("of the loop")
        assert seen[-3:] == ["stop", "closed", "network closed"]
        assert peer._network_side.ended.is_set()
        assert ("device-side assert" in caplog.text) == broken
        assert side.waited == 0
    finally:
        assert thread.stop(10.0)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore about it"), ConfigError,
            r"^too little memory on the GPU .* \(CUDA out of memory. Tried 2 GiB.\); free some of it, or",
        ),
        (RuntimeError("device-side assert"), RuntimeError, r"^device-side assert$"),
    ],
)  # fmt: skip
def test_joining_ends_if_the_weights_cannot_be_written(
    error: Exception, raised: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it trains, a peer tries again at each step. Before that there is nothing to go on with."""

    def land(exchange: Exchange) -> None:
        exchange.landing_error = error

    monkeypatch.setattr(Exchange, "idle", land)
    thread, records = NetworkThread(), list[str]()
    try:
        with pytest.raises(raised, match=message):
            peer_of(thread, Records(records), may_found=False)
        assert records[-2:] == ["stop", "closed"]
    finally:
        assert thread.stop(10.0)
