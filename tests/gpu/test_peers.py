"""Two real peers whose weights are on one GPU."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

import p2ptrain
from p2ptrain.algorithms.indexspace import ParameterView
from p2ptrain.algorithms.transfers import Transfers
from p2ptrain.peer.device_transfers import DeviceFragments, device_transfers
from p2ptrain.peer.model_layout import ModelParts
from tests.gpu.conftest import needs_gpu
from tests.side_stream import LateStream
from tests.swarm.processes import DEADLINE_S


@pytest.fixture(params=[pytest.param("stand-in", marks=pytest.mark.long), pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the models are. On the stand-in, transfers end some steps after they began."""
    polls = itertools.count()

    def transfers(parts: ModelParts) -> Transfers:
        assert isinstance(parts.view, ParameterView)
        return device_transfers(parts.view, LateStream(lambda: next(polls) % 3))

    if request.param == "stand-in":
        monkeypatch.setattr(ModelParts, "transfers", transfers)
        return "cpu"
    return "cuda"


class Loop:
    """A training loop, one step at a time: which half of 64 numbers has the greater sum?"""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model.to(device), device
        self.rounds: list[p2ptrain.RoundReport] = []
        self.committed = self.merged = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, peer: p2ptrain.Peer) -> None:
        numbers = torch.randn(16, 64, device=self.device)
        labels = (numbers[:, :32].sum(1) > numbers[:, 32:].sum(1)).long()
        loss = nn.functional.cross_entropy(self.model(numbers), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        report = peer.step(loss=loss.item(), samples=len(numbers))
        self.merged += report.merged
        if report.round is not None:
            self.rounds.append(report.round)
            self.committed += report.round.status == "committed"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 2))


def test_two_peers_commit_rounds_and_merge_fragments(device: str) -> None:
    first, second = Loop(mlp(), device), Loop(mlp(), device)
    assert isinstance(ModelParts(first.model).transfers().fragments, DeviceFragments)
    run = {"run_id": "gpu", "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
    with (
        p2ptrain.join(first.model, diloco=p2ptrain.DiLoCo(sync_every=20), **run) as a,
        p2ptrain.join(second.model, initial_peers=a.maddrs, **run) as b,
    ):
        for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)  # the joiner has adopted them
        deadline = time.monotonic() + DEADLINE_S
        while (
            min(sum(r.status == "committed" for r in loop.rounds) for loop in (first, second)) < 2 or not first.merged
        ):
            assert time.monotonic() < deadline, (first.rounds, second.rounds)
            first.step(a)
            second.step(b)
        assert {a.peer_id, b.peer_id} == set(first.rounds[-1].contributors)
        assert a.failure is None
        assert b.failure is None
    hashes = [{(r.lineage, r.round): r.anchor_hash for r in loop.rounds} for loop in (first, second)]
    shared = hashes[0].keys() & hashes[1].keys()
    assert shared
    assert all(hashes[0][key] == hashes[1][key] for key in shared)
