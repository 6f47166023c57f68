"""`Peer.state_dict()`: the weights are then of the state's round, whatever the network side is doing."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trio
from torch import nn

from p2ptrain.errors import NetworkFailedError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.network.thread import NetworkThread
from p2ptrain.peer import network_side
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.peer.peer import Peer
from p2ptrain.peer.peer_state import from_dict
from p2ptrain.protocol.exchange import exchange
from p2ptrain.protocol.rounds.landing import commit
from p2ptrain.settings.config import RunConfig
from tests.peer.pair import memory_peer

DEADLINE_S = 30.0


class Alone:
    """A peer that is alone in its run, whose rounds are due every three steps, and its model."""

    def __init__(self, thread: NetworkThread) -> None:
        self.model = nn.Linear(4, 4)
        run = RunConfig(run_id="test", sync_every=3, fragment_fraction=0.0)
        self.peer: Peer = memory_peer(ModelParts(self.model), run, "a", MemoryNetwork(), thread, may_found=True)
        self.exchange, self.driver = self.peer._exchange, self.peer._runner.node.driver

    def train_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            if not self.exchange.landing_pending:
                with torch.no_grad():
                    self.model.weight.add_(0.01)
                self.peer.step(samples=1)
            _until(condition, 0.1)

    def round_of_state(self) -> int:
        """The round of a new state, which must be undamaged."""
        return from_dict(self.peer.state_dict(), self.exchange.new_state()).head.round


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def alone() -> Iterator[Alone]:
    thread = NetworkThread()
    try:
        made = Alone(thread)
        yield made
        made.peer.leave()
    finally:
        assert thread.stop(10.0)


def test_a_round_that_the_state_has_lands_in_the_weights_and_the_next_step_reports_it(alone: Alone) -> None:
    alone.train_until(lambda: alone.exchange.landing_pending)
    assert alone.exchange.epoch.round == -1
    before = alone.model.weight.detach().clone()
    assert alone.round_of_state() == 0
    assert alone.exchange.epoch.round == 0
    assert not torch.equal(alone.model.weight, before)
    report = alone.peer.step(samples=1).round
    assert report is not None
    assert report.round == 0


def test_a_state_that_is_being_replaced_lands_first(alone: Alone) -> None:
    """The node holds the state until the training thread, which asks for a copy of it, has landed it."""
    alone.peer.step(samples=1)
    restored = from_dict(alone.peer.state_dict(), alone.exchange.new_state())
    alone.peer._thread.start_soon(alone.peer._runner.node.state_sync.restore, restored)
    assert _until(lambda: alone.exchange.landing_pending, DEADLINE_S)
    assert alone.round_of_state() == -1
    assert not alone.exchange.landing_pending


def test_a_round_that_cannot_be_landed_keeps_nobody_waiting(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    alone.train_until(lambda: alone.exchange.landing_pending)

    def fail(section: int | None) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(alone.exchange, "_flat_of", fail)
        with pytest.raises(TimeoutError, match="a round could not be landed in the weights: out of memory"):
            alone.peer.state_dict()
    assert alone.round_of_state() == 0


def test_no_state_is_saved_that_a_round_changed_only_in_part(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        step_chunk(*args)
        raise MemoryError

    monkeypatch.setattr(commit, "STEP_RETRY_S", 0.01)
    step_chunk = commit.step_chunk
    with monkeypatch.context() as broken:
        broken.setattr(commit, "step_chunk", fail)
        alone.train_until(lambda: alone.driver.committer.interrupted and not alone.driver.committer.lock.locked())
        with pytest.raises(TimeoutError, match="only a part of the state"):
            alone.peer.state_dict()
    monkeypatch.setattr(alone.driver.committer, "_retry_s", 0.0)
    alone.train_until(lambda: alone.exchange.landing_pending)
    assert alone.round_of_state() == 0


@pytest.mark.parametrize("how", ["ends", "is abandoned"])
@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_the_network_thread_is_noticed_and_costs_no_state(
    how: str, leaves: bool, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.train_until(lambda: alone.exchange.landing_pending and not alone.driver.committer.stepping)
    assert alone.peer.failure is None

    def end() -> None:
        raise SystemExit("a library ends the thread")

    def fail(*args: object) -> None:
        raise OSError(errno.EBADF, "trio has closed its sockets")

    if how == "ends":
        alone.peer._thread.post(end)
        assert _until(lambda: alone.peer.failure is not None, DEADLINE_S)
    else:
        monkeypatch.setattr(network_side, "ENDED_S", 0.1)
        monkeypatch.setattr(trio.lowlevel.TrioToken, "run_sync_soon", fail)
    if leaves:
        alone.peer.leave()
    assert alone.round_of_state() == 0
    assert not alone.exchange.landing_pending
    if how == "ends" or not leaves:
        assert isinstance(alone.peer.failure, NetworkFailedError)
    monkeypatch.undo()


@pytest.mark.parametrize("uploads_end_after", [0, 5])
def test_a_peer_that_left_in_the_middle_of_an_outer_step_saves_a_whole_state(
    uploads_end_after: int, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of a large model takes longer than a leaving peer waits, and a GPU takes a while to get the round."""
    step_chunk, go_on, asked = commit.step_chunk, threading.Event(), itertools.count()
    monkeypatch.setattr(network_side, "LANDING_S", 0.1)
    monkeypatch.setattr(network_side, "ENDED_S", 0.1)
    monkeypatch.setattr(network_side, "TRANSFERS_S", 0.1)
    monkeypatch.setattr(exchange, "has_ended", lambda upload: next(asked) >= uploads_end_after)

    def late(*arguments: Any) -> None:
        assert go_on.wait(DEADLINE_S)
        step_chunk(*arguments)

    monkeypatch.setattr(commit, "step_chunk", late)
    alone.train_until(lambda: alone.driver.committer.stepping)
    alone.peer.leave("interrupted")
    ended = alone.peer._network_side.ended
    assert not ended.is_set()
    wait = ended.wait

    def then_go_on(timeout_s: float) -> bool:
        go_on.set()
        return wait(timeout_s)

    monkeypatch.setattr(ended, "wait", then_go_on)
    monkeypatch.setattr(network_side, "TRANSFERS_S", DEADLINE_S)
    assert alone.round_of_state() == 0
    assert alone.exchange.epoch.round == 0
