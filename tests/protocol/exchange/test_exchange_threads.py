"""An exchange between two real threads with frequent switches: no lost updates, no torn reads."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import (
    Arrival,
    Epoch,
    Landing,
    LandingDone,
    Push,
    PushPlan,
    RoundDue,
    Snapshot,
    SnapshotTaken,
    SnapshotWanted,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.hearing import hear

SPACE = IndexSpace([("weight", (2, 64))])
SYNC_EVERY = 10


@pytest.fixture(autouse=True)
def switched_all_the_time() -> Iterator[None]:
    torch.set_num_threads(1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Sides:
    """A training thread that steps, and the node's side in the test's own thread; posts wait for the node's side."""

    def __init__(self) -> None:
        self.posts: list[Callable[[], object]] = []
        ticks = itertools.count()
        run = RunConfig(fragment_fraction=0.5, sync_every=SYNC_EVERY, total_steps=0)
        self.exchange = Exchange(
            ParameterView(SPACE, [torch.zeros(2, 64)]), run, clock=lambda: 0.01 * next(ticks), post=self.posts.append
        )
        self.exchange.epoch = Epoch("L", 0)
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self.positions: list[int] = []

    def train(self) -> None:
        try:
            while not self.stop.is_set():
                self.exchange.step(1)
                self.positions.append(self.exchange.run_step)
        except BaseException as error:
            self.failure = error

    def run(self, node: Callable[[], bool], times: int) -> None:
        """Step in a thread while the node's side works, until that has done its work so many times."""
        thread = threading.Thread(target=self.train)
        thread.start()
        try:
            while times and self.failure is None:
                times -= node()
                self.deliver_posts()
        finally:
            self.stop.set()
            thread.join()
        self.deliver_posts()
        assert self.failure is None

    def deliver_posts(self) -> None:
        while self.posts:
            self.posts.pop(0)()


def test_postponing_loses_no_step_and_the_position_never_goes_back() -> None:
    sides = Sides()

    def postpone() -> bool:
        sides.exchange.postpone()
        return True

    sides.run(postpone, times=5000)
    assert sides.exchange.run_step == sides.exchange.steps == len(sides.positions)
    assert sides.positions == sorted(sides.positions)


def test_the_last_wish_for_a_snapshot_is_always_granted_and_no_other() -> None:
    sides = Sides()
    taken: list[Snapshot] = []
    hear(sides.exchange, {SnapshotTaken: taken.append})

    def wish() -> bool:
        """Twice in a row, so that the second one comes while the first is granted."""
        for _ in range(2):
            last = SnapshotWanted(torch.empty(2, 64), latest_s=-1.0)
            sides.exchange.want_snapshot(last)
        steps = sides.exchange.steps
        while not taken and sides.failure is None and sides.exchange.steps < steps + 20:
            sides.deliver_posts()
        sides.deliver_posts()
        assert [snapshot.weights is last.buffer for snapshot in taken] == [True]
        taken.clear()
        sides.exchange.want_snapshot(None)
        return True

    sides.run(wish, times=100)


def test_rounds_land_while_others_are_postponed_and_each_is_told() -> None:
    sides = Sides()
    landed: list[int] = []
    hear(sides.exchange, {LandingDone: lambda landing, held_s: landed.append(landing.epoch.round)})
    handed: list[int] = []

    def node() -> bool:
        sides.exchange.postpone()
        if sides.exchange.landing_pending:
            return False
        handed.append(len(handed) + 1)
        epoch, position = Epoch("L", handed[-1]), sides.exchange.run_step
        sides.exchange.land(Landing("keep", None, epoch, SYNC_EVERY, position, 0, None, None, False))
        return True

    sides.run(node, times=100)
    sides.exchange.idle()
    sides.deliver_posts()
    assert landed == handed
    assert sides.exchange.epoch == Epoch("L", handed[-1])


def test_every_fragment_is_merged_or_counted() -> None:
    sides = Sides()
    plan = SPACE.plan(np.array([0]))
    sent = skipped = merged = 0

    def node() -> bool:
        nonlocal sent, skipped, merged
        for sender in "abc":
            sent += 1
            sides.exchange.inbox.put(Arrival(sender, Epoch("L", 0), plan, torch.zeros(1, 64), 0.0, arrived_s=1e9))
        sides.exchange.inbox.count_skipped("lost")
        sent += 1
        more_merged, more_skipped, _ = sides.exchange.inbox.take_counts()
        merged += more_merged
        skipped += sum(more_skipped.values())
        return True

    sides.run(node, times=500)
    for _ in range(5):
        sides.exchange.step(1)
    more_merged, more_skipped, _ = sides.exchange.inbox.take_counts()
    assert merged + more_merged + skipped + sum(more_skipped.values()) == sent
    assert merged + more_merged


def test_every_offered_push_is_gathered() -> None:
    sides = Sides()
    gathered: list[int] = []
    hear(sides.exchange, {Push: lambda push: gathered.append(push.plan.cycle)})
    plan = SPACE.plan(np.array([1]))
    offered: list[int] = []

    def node() -> bool:
        if len(gathered) < len(offered):
            return False
        offered.append(len(offered))
        sides.exchange.offer_push(PushPlan(offered[-1], 0, 1, plan))
        return True

    sides.run(node, times=100)
    for _ in range(5):
        sides.exchange.step(1)
    sides.deliver_posts()
    assert gathered == offered


def test_a_listener_that_fails_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sides = Sides()

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a bug of the node")

    hear(sides.exchange, {RoundDue: fail, LandingDone: fail})
    for _ in range(3 * SYNC_EVERY):
        sides.exchange.step(1)
        sides.exchange.postpone()
    sides.exchange.land(Landing("keep", None, Epoch("L", 1), SYNC_EVERY, 0, 0, None, None, False))
    sides.exchange.step(1)
    sides.deliver_posts()
    assert sides.exchange.epoch == Epoch("L", 1)
    assert caplog.text.count("Traceback") == 1


def test_a_detached_exchange_sends_no_events_and_a_landing_still_lands() -> None:
    sides = Sides()
    told: list[object] = []
    hear(sides.exchange, {RoundDue: lambda: told.append("due")})
    hear(sides.exchange, {Push: told.append, SnapshotTaken: told.append})
    hear(sides.exchange, {LandingDone: lambda landing, held_s: told.append(landing)})
    sides.exchange.offer_push(PushPlan(0, 0, 1, SPACE.plan(np.array([1]))))
    sides.exchange.want_snapshot(SnapshotWanted(torch.empty(2, 64), latest_s=-1.0))
    sides.exchange.land(Landing("keep", None, Epoch("L", 7), SYNC_EVERY, 5, 0, None, None, False))
    sides.exchange.step(1)  # all of it is on its way to the node's side
    sides.exchange.detach()
    for _ in range(2 * SYNC_EVERY):
        sides.exchange.step(1)
    sides.deliver_posts()
    assert told == []
    assert sides.exchange.epoch == Epoch("L", 7)
    assert not sides.exchange.landing_pending
