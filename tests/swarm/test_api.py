"""`p2ptrain.join` around a model and a loop of one's own: two peers in this process, each stepped in turn."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import trio
from torch import nn

import p2ptrain
from p2ptrain.errors import UnreachableError
from p2ptrain.network import host
from p2ptrain.protocol.state_sync import state_sync
from p2ptrain.protocol.state_sync.land_state import land_state
from tests.swarm.processes import DEADLINE_S

RUN: dict[str, Any] = {"run_id": "cnn", "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
DILOCO = p2ptrain.DiLoCo(sync_every=20)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("p2ptrain"):
            thread.join(DEADLINE_S)  # it was told to end
            assert not thread.is_alive(), thread.name
    assert [child for child in psutil.Process().children() if child.name() == "p2pd"] == []


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)
    )


class Loop:
    """Somebody's own training loop, a step at a time: is the upper or the lower half of an image the brighter one?"""

    def __init__(self, model: nn.Module, peer: p2ptrain.Peer) -> None:
        self.model, self.peer = model, peer
        self.reports: list[p2ptrain.StepReport] = []
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._generator = torch.Generator().manual_seed(peer.data_seed)

    def step(self) -> None:
        images = torch.randn(16, 1, 8, 8, generator=self._generator)
        labels = (images[:, :, :4].mean((1, 2, 3)) > images[:, :, 4:].mean((1, 2, 3))).long()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.reports.append(self.peer.step(loss=loss.item(), samples=len(images)))

    @property
    def rounds(self) -> list[p2ptrain.RoundReport]:
        return [report.round for report in self.reports if report.round is not None]


def train_until(condition: Callable[[], object], *loops: Loop) -> None:
    """Step all loops in turn until the condition is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, [loop.rounds[-3:] for loop in loops]
        for loop in loops:
            loop.step()


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_two_peers_train_a_model_with_buffers(tmp_path: Path) -> None:
    records = tmp_path / "a.jsonl"
    with p2ptrain.join(cnn_a := cnn(0), diloco=DILOCO, metrics=records, prometheus=0, dashboard=0, **RUN) as a:
        assert all(maddr.endswith(f"/p2p/{a.peer_id}") for maddr in a.maddrs)
        first = Loop(cnn_a, a)
        train_until(lambda: a.round >= 2, first)
        assert all(report.status == "solo" for report in first.rounds)
        assert a.alive == []
        with urllib.request.urlopen(f"{a.dashboard}api/state") as page:
            assert [json.loads(line[6:])["run_id"] for line in islice(page, 2) if line.startswith(b"data")] == ["cnn"]

        with p2ptrain.join(cnn_b := cnn(1), initial_peers=a.maddrs, **RUN) as b:
            # The settings, weights, position and buffers of the run, as a joiner finds them.
            assert (b.run, b.round, b.anchor_hash) == (a.run, a.round, a.anchor_hash)
            assert b.run_step > 0
            anchor = b.anchor_state_dict()
            for name, parameter in cnn_b.named_parameters():
                torch.testing.assert_close(parameter.data, anchor[name], rtol=0, atol=0)
            for (name, ours), theirs in zip(cnn_b.named_buffers(), cnn_a.buffers(), strict=True):
                assert torch.equal(ours, theirs), name

            second = Loop(cnn_b, b)
            train_until(lambda: first.rounds[-1].status == "committed" and second.rounds, first, second)
            assert set(first.rounds[-1].contributors) == {a.peer_id, b.peer_id}
            assert (a.alive, b.alive) == ([b.peer_id], [a.peer_id])
            assert [other.peer_id for other in a.others] == [b.peer_id]
            # Its first beat is older than its first step.
            train_until(lambda: a.others[0].speed > 0 and a.others[0].rtt_s > 0, first, second)
            train_until(lambda: a.others[0].status == "training", first, second)
            train_until(lambda: a.others[0].round >= 2, first, second)
            train_until(lambda: same_tensors(a.anchor_state_dict(), b.anchor_state_dict()), first, second)
            train_until(lambda: any(report.merged for report in first.reports), first, second)
        train_until(lambda: a.alive == [], first)
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(a.dashboard)
    # A late joiner: the peers have ended. What its user sees is short.
    with pytest.raises(UnreachableError, match="no initial peer can be reached") as late:
        p2ptrain.join(cnn(1), initial_peers=a.maddrs, **RUN)
    assert [entry.path.name for entry in late.traceback] == ["test_api.py", "api.py"]
    assert late.value.__suppress_context__

    anchors = [{(r.lineage, r.round): r.anchor_hash for r in loop.rounds} for loop in (first, second)]
    shared = anchors[0].keys() & anchors[1].keys()
    assert shared
    assert all(anchors[0][key] == anchors[1][key] for key in shared)
    events = {json.loads(line)["event"] for line in records.read_text().splitlines()}
    assert events >= {"start", "status", "step", "fragments", "round", "peers", "stop"}


def test_a_port_in_use_is_reported_and_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(p2ptrain.ConfigError, match=f"--prometheus {port}: another program uses that port"):
            p2ptrain.join(cnn(0), prometheus=port, **RUN)


def test_an_exception_of_the_loop_leaves_the_run_and_comes_out_unchanged() -> None:
    error = LookupError("of the user's own")

    def train_and_fail(to: p2ptrain.Peer) -> None:
        with p2ptrain.join(cnn(1), initial_peers=to.maddrs, **RUN) as peer:
            peer.step()
            raise error

    with p2ptrain.join(cnn_a := cnn(0), diloco=DILOCO, **RUN) as a:
        with pytest.raises(LookupError) as caught:
            train_and_fail(a)
        assert caught.value is error
        assert caught.value.__cause__ is None
        train_until(lambda: a.alive == [], Loop(cnn_a, a))


@pytest.mark.long
def test_one_that_is_cut_off_for_good_says_so_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESTART_AFTER_S", ())
    with p2ptrain.join(model := cnn(0), diloco=DILOCO, **RUN) as peer:
        loop = Loop(model, peer)
        train_until(lambda: loop.rounds, loop)
        assert peer.failure is None
        (daemon,) = (child for child in psutil.Process().children() if child.name() == "p2pd")
        daemon.kill()
        train_until(lambda: peer.failure, loop)
        assert "p2pd" in str(peer.failure)
        round_ = peer.round
        train_until(lambda: peer.round > round_, loop)  # alone


def test_numbers_of_any_library_are_steps_and_odd_ones_are_refused_at_once(tmp_path: Path) -> None:
    records = tmp_path / "a.jsonl"
    statuses: list[str] = []

    def on_status(status: str) -> None:
        statuses.append(status)
        raise LookupError("a bug of the user's")

    with p2ptrain.join(model := cnn(0), diloco=DILOCO, metrics=records, on_status=on_status, **RUN) as peer:
        for loss in (
            1,
            1.5,
            np.float32(2),
            torch.tensor(2.5, requires_grad=True),
            math.nan,
            torch.tensor(math.inf),
            None,
        ):
            report = peer.step(loss=loss, samples=np.int64(8))
            assert report.exchange_s > 0
        for samples in (-1, 2.5, "8"):
            with pytest.raises(p2ptrain.ConfigError, match=f"samples = {samples!r}: must be a whole number"):
                peer.step(samples=samples)  # type: ignore[arg-type]
        with pytest.raises(p2ptrain.ConfigError, match="loss = 'low': must be one number"):
            peer.step(loss="low")  # type: ignore[arg-type]
        peer.record("mine", tensor=torch.ones(2), number=np.float64(0.5))
        train_until(lambda: peer.round >= 1, Loop(model, peer))
        assert peer.failure is None
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["loss"] for step in steps[:7]] == [1, 1.5, 2, 2.5, None, None, None]
    assert {step["tokens"] for step in steps[:7]} == {8}
    assert [line["number"] for line in lines if line["event"] == "mine"] == [0.5]
    assert statuses


def test_a_network_side_that_fails_is_restarted_and_says_so(tmp_path: Path) -> None:
    records = tmp_path / "a.jsonl"
    with (
        p2ptrain.join(cnn_a := cnn(0), diloco=DILOCO, metrics=records, **RUN) as a,
        p2ptrain.join(cnn_b := cnn(1), initial_peers=a.maddrs, **RUN) as b,
    ):
        first, second = Loop(cnn_a, a), Loop(cnn_b, b)
        train_until(lambda: first.rounds and first.rounds[-1].status == "committed", first, second)
        watch = a.watch()
        # Both stand on one state: the new node takes it from the other peer.
        train_until(lambda: a.anchor_hash == b.anchor_hash and a.status == b.status == "training", first, second)
        maddrs, node, round_ = a.maddrs, a._runner.node, a.round
        loaded: list[bytes] = []
        a._parts.load_buffers = loaded.append  # type: ignore[method-assign]

        def fail() -> None:
            node._fail(ZeroDivisionError("a bug of ours"))

        a._thread.post(fail)
        train_until(lambda: "restarting" in a.status, first, second)
        assert a.failure is None
        assert a.anchor_state_dict().keys() == b.anchor_state_dict().keys()
        train_until(lambda: a._runner.node is not node and a.alive == [b.peer_id], first, second)
        assert a.maddrs == maddrs
        landed = len(first.rounds)
        train_until(
            lambda: any(len(r.contributors) == 2 and r.round > round_ for r in first.rounds[landed:]), first, second
        )
        train_until(lambda: any(m.peer_id == b.peer_id and m.linked for m in watch.take().members), first, second)
        watch.stop()
        assert loaded == []  # a forward pass may be using the buffers
        assert a.founded
    told = [json.loads(line) for line in records.read_text().splitlines()]
    assert any("restarting" in line["status"] for line in told if line["event"] == "status")
    reasons = [line["reason"] for line in told if line["event"] == "adopt"]
    assert reasons[1] in ("adopted the swarm's state", "the swarm has the checkpoint's state")


def test_a_state_is_taken_up_again_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def land_late(*args: Any, **kwargs: Any) -> None:
        await trio.sleep(0.2)  # the head is the restored one already
        await land_state(*args, **kwargs)

    monkeypatch.setattr(state_sync, "land_state", land_late)
    with p2ptrain.join(model := cnn(0), diloco=DILOCO, **RUN) as peer:
        fresh = peer.state_dict()
        train_until(lambda: peer.round >= 2, Loop(model, peer))
        saved, anchor, run_step, round_ = peer.state_dict(), peer.anchor_hash, peer.run_step, peer.round
        assert not peer.load_state_dict(fresh)
    with p2ptrain.join(model, diloco=DILOCO, resume=saved, **RUN) as peer:
        assert (peer.anchor_hash, peer.run_step, peer.round) == (anchor, run_step, round_)
    assert "differ from those of the state" not in caplog.text
    other = cnn(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    with p2ptrain.join(other, resume=saved, **RUN) as peer:
        assert peer.run.sync_every == DILOCO.sync_every
    assert "the model's weights differ from those of the state to resume from by" in caplog.text
    with p2ptrain.join(model, diloco=p2ptrain.DiLoCo(sync_every=21), **RUN) as peer:
        assert peer.load_state_dict(saved)
    assert "other settings than this one: sync_every = 21 (was 20)" in caplog.text
    with p2ptrain.join(model, diloco=DILOCO, **RUN) as peer:
        assert peer.load_state_dict(saved)
        assert (peer.anchor_hash, peer.run_step, peer.round) == (anchor, run_step, round_)
        train_until(lambda: peer.round > round_, Loop(model, peer))


def test_what_contradicts_the_run_is_named() -> None:
    with p2ptrain.join(cnn(0), diloco=DILOCO, **RUN) as peer:
        with pytest.raises(p2ptrain.RunMismatchError, match="sync_every: you gave 7, but run 'cnn' trains with 20"):
            p2ptrain.join(cnn(1), initial_peers=peer.maddrs, diloco=p2ptrain.DiLoCo(sync_every=7), **RUN)
        with pytest.raises(p2ptrain.RunMismatchError, match="model: yours has 6 trained parameters in 2 tensors"):
            p2ptrain.join(nn.Linear(2, 2), initial_peers=peer.maddrs, **RUN)


@pytest.mark.long
def test_a_joiner_takes_over_the_moments_that_rounds_average() -> None:
    diloco = p2ptrain.DiLoCo(sync_every=10, codec="none", inner_moments="averaged")
    models = [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    with pytest.raises(p2ptrain.ConfigError, match="given is no optimizer"):
        p2ptrain.join(models[0], diloco=diloco, **RUN)

    def step(number: int, peer: p2ptrain.Peer) -> None:
        models[number](torch.randn(4, 8)).square().mean().backward()
        optimizers[number].step()
        optimizers[number].zero_grad()
        peer.step(samples=4)

    with p2ptrain.join(models[0], optimizer=optimizers[0], diloco=diloco, **RUN) as founder:
        while founder.round < 2:
            step(0, founder)
        founder_state = founder.state_dict()
        with p2ptrain.join(models[1], optimizer=optimizers[1], initial_peers=founder.maddrs, **RUN) as joiner:
            assert joiner.anchor_hash == founder.anchor_hash
            assert founder_state["run_step"] >= 20
            for parameter in models[1].parameters():
                state = optimizers[1].state[parameter]
                assert state["exp_avg_sq"].min() > 0
                assert 10 <= state["step"].item() <= founder_state["run_step"]
