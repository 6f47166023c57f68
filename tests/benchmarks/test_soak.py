"""What a soak does is drawn from its seed, and its model keeps its pace without being another model."""

from __future__ import annotations

from collections import Counter

import torch

from benchmarks import paced as pace
from benchmarks.soak.plan import KINDS, plan_faults
from p2ptrain.models import build


def test_faults_come_from_the_seed_at_the_rate_that_is_asked_for() -> None:
    def plan(seed: int) -> object:
        return plan_faults(seed=seed, peers=4, minutes=200, per_minute=1)

    assert plan(1) == plan(1) != plan(2)
    faults = plan_faults(seed=1, peers=4, minutes=200, per_minute=1)
    assert 150 < len(faults) < 250
    assert set(Counter(fault.kind for fault in faults)) == set(KINDS)
    assert all(fault.at_s + fault.lasts_s <= 200 * 60 for fault in faults)


def test_nobody_suffers_from_two_at_once_and_one_is_only_ever_paused() -> None:
    free_from = [0.0] * 4
    for fault in plan_faults(seed=3, peers=4, minutes=200, per_minute=4):
        assert fault.at_s >= free_from[fault.peer]
        free_from[fault.peer] = fault.at_s + fault.lasts_s
        assert fault.peer < 3 or fault.kind == "pause"


def test_a_paced_model_is_the_demo_model_at_a_pace() -> None:
    torch.manual_seed(5)
    paced, plain = pace.evenly(vocab_size=100), build("gpt-demo", vocab_size=100, seed=5)
    assert paced.context == plain.context
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    torch.testing.assert_close(paced.eval()(tokens), plain.eval()(tokens))
    assert paced._next_s == 0.0
    paced.train()(tokens)
    assert paced._next_s > 0.0
