"""Honest members whose data is opposed, half of them each: none is left out, and the anchor is between their optima."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import trio

from p2ptrain.algorithms.outer import outer_step
from p2ptrain.protocol.rounds.deciding.guard import MOST_NORMS, guarded, scaled_down
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.deciding.test_policy import join_of
from tests.protocol.swarm import RUN, TestPeer, run_virtual, swarm

ROUNDS = 12


def scales_of_a_run(run: RunConfig, peers: int, rate: float, seed: int) -> tuple[list[float], float]:
    """Rounds of DiLoCo on quadratics with the optima 0 and 1, from near the first, as one of its peers has founded it.

    Returns the guard's scales, of all members and rounds, and the last anchor's mean.
    """
    rng = np.random.default_rng(seed)
    targets = np.arange(peers)[:, None] % 2
    anchor = (1e-3 * rng.standard_normal(64)).astype(np.float32)
    names, moments = [f"p{i}" for i in range(peers)], [np.zeros_like(anchor)]
    joins = {name: join_of(name) for name in names}
    scales: list[float] = []
    for round_ in range(ROUNDS):
        moved = rate * (targets - anchor) + 0.01 * rng.standard_normal((peers, 64))
        gradients = dict(zip(names, (-moved).astype(np.float32), strict=True))
        norms = {name: float(np.linalg.norm(gradient)) for name, gradient in gradients.items()}
        verdicts = guarded(run, joins, norms, names[rng.integers(peers)])
        of_round = [verdict.scale for verdict in verdicts.values()]
        scales += of_round
        weights = scaled_down([1.0] * peers, of_round) if min(of_round) else of_round
        mean = np.average(list(gradients.values()), axis=0, weights=weights).astype(np.float32)
        outer_step("nesterov", anchor, moments, mean, lr=run.outer_lr, momentum=run.outer_momentum, round_=round_)
    return scales, float(anchor.mean())


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])  # of the way to the optimum in an interval
@pytest.mark.parametrize("peers", [2, 4, 8])
def test_members_with_opposed_data_are_never_left_out(peers: int, rate: float) -> None:
    for seed in range(20):
        scales, anchor = scales_of_a_run(RunConfig(), peers, rate, seed)
        assert min(scales) > 0
        assert anchor == pytest.approx(0.5, abs=0.3)
        # Of four or more, the median is within reach of the larger half.
        assert peers == 2 or min(scales) == 1
    # So that this can fail: the disjoint mean does not scale, and leaves one of two out.
    assert peers > 2 or min(scales_of_a_run(RunConfig(round_mean="disjoint"), peers, rate, 0)[0]) == 0


@pytest.mark.parametrize("factor", [-5.0, -1e6, 1e30])
@pytest.mark.parametrize("liars", [1, 2, 3])
def test_of_eight_a_minority_with_far_too_large_norms_is_still_left_out(liars: int, factor: float) -> None:
    rng = np.random.default_rng(0)
    norms = {f"p{i}": float(rng.uniform(0.8, 1.2)) for i in range(8)}
    lying = list(norms)[-liars:]
    norms.update({name: abs(factor) * norms[name] for name in lying})
    verdicts = guarded(RunConfig(), {name: join_of(name) for name in norms}, norms, "p0")
    assert [name for name, verdict in verdicts.items() if verdict.scale == 0] == lying


@pytest.mark.parametrize("factor", [5.0, 1e6, 1e30])
def test_of_two_a_liar_counts_as_at_most_three_times_the_leader(factor: float) -> None:
    norms = {"a": 1.0, "x": factor}
    verdict = guarded(RunConfig(), {name: join_of(name) for name in norms}, norms, "a")["x"]
    assert math.isclose(verdict.scale * factor, MOST_NORMS)


async def train_towards(peer: TestPeer, target: float) -> None:
    """As `TestPeer.train`, on a quadratic with this optimum."""
    while not peer.node.ready.is_set():
        peer.exchange.idle()
        await trio.sleep(0.05)
    generator = torch.Generator().manual_seed(peer.rng.randrange(2**31))
    while True:
        await trio.sleep(peer.step_s)
        for tensor in peer.tensors:
            tensor.lerp_(torch.full_like(tensor, target), 0.04)
            tensor.add_(0.01 * torch.randn(tensor.shape, generator=generator))
        peer.exchange.step(16)


def test_a_second_peer_with_opposed_data_contributes_to_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The founder is at its optimum when the other joins, so that its own norm is small."""
    monkeypatch.setattr(TestPeer, "train", lambda peer: train_towards(peer, float(peer.peer_id == "b")))

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, outer_momentum=0.6), shapes=[("w", (40, 64))]) as s:
            a = s.start("a", founder=True)
            await s.until(lambda: len(a.rounds("solo")) >= 4)
            b = s.start("b")
            await s.until(lambda: len(b.rounds("committed")) >= 8)
            rounds = b.rounds()
            assert not any(r["late"] or r["reason"] for r in rounds[1:]), rounds
            assert all(r["contributors"] == ["a", "b"] for r in rounds[1:])
            assert 0.3 < float(a.node.state.anchor.mean()) < 0.7

    run_virtual(main)
