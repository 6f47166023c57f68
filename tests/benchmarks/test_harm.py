"""The measurement of harm: liars send what their attack says, and lines of results are found again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harm import (
    ATTACKS,
    MEANS,
    NOISE_FACTOR,
    Cell,
    Liars,
    LyingContribution,
    cells,
    differences,
    read_results,
    run,
    table,
)
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.indexspace import IndexSpace
from p2ptrain.protocol.exchange.types import Epoch, Push, PushPlan, Snapshot
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution

RNG = np.random.default_rng(0)
ANCHOR = RNG.standard_normal((4, 64), np.float32)
HONEST = RNG.standard_normal((2, 64), np.float32)


def liars(attack: str) -> Liars:
    """peer-6 and peer-7 lie; two rounds have been."""
    found = Liars(Cell(attack, 2, "weighted", 0))
    for round_ in range(2):
        for number in range(8):
            found.note_snapshot(f"peer-{number}", torch.full((4, 64), number + 10.0 * round_))
    return found


def push(value: float = 1.0) -> Push:
    plan = IndexSpace([("weight", (4, 64))]).plan(np.array([1, 3]))
    return Push(PushPlan(0, 0, 1, plan), Epoch(), torch.full((2, 64), value), 0.0, 0, 0.0)


def test_an_attack_on_rounds_replaces_the_outer_gradient() -> None:
    def lie(attack: str) -> np.ndarray:
        return liars(attack).gradient("peer-7", HONEST, ANCHOR[1:3], 1)

    np.testing.assert_array_equal(lie("times -5"), -5 * HONEST)
    assert not lie("zeros").any()
    np.testing.assert_array_equal(lie("copy"), ANCHOR[1:3] - 10)
    np.testing.assert_array_equal(lie("stale"), ANCHOR[1:3] - 7)
    np.testing.assert_array_equal(lie("flipped"), HONEST)
    assert np.linalg.norm(lie("noise")) == pytest.approx(NOISE_FACTOR * np.linalg.norm(HONEST), rel=0.2)


def test_an_attack_on_fragments_replaces_their_values() -> None:
    def lie(attack: str) -> torch.Tensor:
        found = liars(attack)
        found.note_push("peer-1", push(5.0))
        found.note_push("peer-0", push(4.0))
        return found.push("peer-7", push()).values

    assert torch.equal(lie("times -5"), push().values)
    assert not lie("zeros").any()
    assert torch.equal(lie("copy"), push(4.0).values)
    assert torch.equal(lie("stale"), push(7.0).values)
    assert float((lie("noise") - 1).square().mean().sqrt()) == pytest.approx(1, rel=0.2)
    # The honest ones are 7 to 2 away from it, 4.5 in the median: twice that, towards the flipped signs.
    assert torch.equal(lie("flipped"), push(1 - 2 * 4.5).values)


def test_a_liar_sends_its_lie_and_lands_as_an_honest_peer_would() -> None:
    def contribution() -> OwnContribution:
        return OwnContribution(Snapshot(Epoch(), torch.ones(4, 64), 0, 0, 0, False, 0.0), Grid(0, 4))

    honest, lying = contribution(), LyingContribution(contribution(), liars("zeros"), "peer-7")
    for own in (honest, lying):
        own.encode(ANCHOR, codec("int8"), (0, 4))
    sent = [codec("int8").decode(own.chunks[0], 4) for own in (honest, lying)]
    assert np.abs(sent[0] - (ANCHOR - 1)).max() < 0.1
    assert not sent[1].any()
    for own in (honest, lying):
        own.land(codec("int8"), 0, np.zeros((4, 64), np.float32), np.empty((0, 64), np.float32))
    assert torch.equal(lying.snapshot.weights, honest.snapshot.weights)


@pytest.mark.long
def test_lies_reach_the_others_through_real_nodes_and_the_guard_leaves_large_ones_out() -> None:
    honest, zeros, large = (
        run(cell, steps=60)
        for cell in (
            Cell("none", 0, "weighted", 0),
            Cell("zeros", 2, "weighted", 0),
            Cell("times -5", 2, "weighted", 0),
        )
    )
    assert honest["lies_in_rounds"] == 0
    assert zeros["lies_in_rounds"] == 2 * zeros["rounds"] > 0
    assert zeros["loss"] != honest["loss"]
    assert large["lies_in_rounds"] < 2 * large["rounds"]


def test_results_are_read_back_and_compared_with_the_same_seed(tmp_path: Path) -> None:
    rows = [
        {"attack": "none", "liars": 0, "mean": "weighted", "seed": 0, "loss": 2.0},
        {"attack": "none", "liars": 0, "mean": "weighted", "seed": 1, "loss": 2.1},
        {"attack": "zeros", "liars": 1, "mean": "clipped", "seed": 0, "loss": 2.5},
        {"attack": "zeros", "liars": 1, "mean": "clipped", "seed": 0, "loss": 2.25},
        {"attack": "zeros", "liars": 1, "mean": "clipped", "seed": 1, "loss": None},
        {"attack": "zeros", "liars": 1, "mean": "clipped", "seed": 2, "loss": 2.0},
    ]
    file = tmp_path / "harm.jsonl"
    assert read_results(file) == {}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = read_results(file)
    assert differences(results, "zeros", 1, "clipped") == [0.25, math.inf]
    assert table(results).splitlines()[2:] == [
        "| none | 0 of 8 | +0.000 (+0.000 to +0.000) | – | – | – |",
        "| zeros | 1 of 8 | – | diverged | – | – |",
    ]


def test_every_cell_is_run_once() -> None:
    everything = cells(tuple(ATTACKS), (1, 2), MEANS, (0, 1, 2))
    assert len(set(everything)) == len(everything) == 3 * len(MEANS) * (1 + 2 * (len(ATTACKS) - 1))
