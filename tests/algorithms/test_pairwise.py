import tracemalloc

import numpy as np
import pytest

from p2ptrain.algorithms.codec import CHUNK_BLOCKS
from p2ptrain.algorithms.pairwise import MOST_TIMES, clip_scale, is_usual, pairwise_step, spread, squared_distance

ETA, MU = 0.7, 0.5


def randn(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def reference(anchors: list[np.ndarray], moments: list[np.ndarray], weights: list[np.ndarray]) -> None:
    """Both terms of the paper, for a group of any size, in place."""
    gradient = sum(w - a for w, a in zip(weights, anchors, strict=True)) / len(anchors)
    mean_anchor = sum(anchors) / len(anchors)
    for anchor, moment in zip(anchors, moments, strict=True):
        moment[:] = MU * moment + ETA * gradient + ETA * (mean_anchor - anchor)
    for anchor, moment, weight in zip(anchors, moments, weights, strict=True):
        anchor += moment
        weight[:] = anchor


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_is_the_papers_with_both_terms(size: int) -> None:
    expected = [[randn(3, 64, seed=10 * kind + i).astype(np.float64) for i in range(size)] for kind in range(3)]
    ours = [[value.astype(np.float32) for value in values] for values in expected]
    for step in range(3):
        reference(*expected)
        thetas = [theta.copy() for theta in ours[2]]
        for i, (anchor, moment, theta) in enumerate(zip(*ours, strict=True)):
            partner = thetas[1 - i].copy() if size == 2 else None
            pairwise_step(anchor, moment, theta, partner, lr=ETA, momentum=MU)
            # What a peer adds to its weights brings them to the new anchor.
            np.testing.assert_allclose(thetas[i] + theta, anchor, rtol=1e-5, atol=1e-5)
        for values, wanted in zip(ours[:2], expected[:2], strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
        for i in range(size):
            noise = randn(3, 64, seed=100 + 2 * step + i)
            ours[2][i], expected[2][i] = expected[2][i].astype(np.float32) + noise, expected[2][i] + noise


def test_a_pair_moves_the_mean_of_its_anchors_by_the_mean_outer_gradient() -> None:
    anchors, thetas = ([randn(2, 64, seed=seed + i) for i in range(2)] for seed in (1, 5))
    before, mean = sum(anchors) / 2, sum(thetas) / 2
    for i, anchor in enumerate(anchors):
        pairwise_step(anchor, np.zeros_like(anchor), thetas[i].copy(), thetas[1 - i].copy(), lr=ETA, momentum=MU)
    np.testing.assert_allclose(sum(anchors) / 2, before + ETA * (mean - before), atol=1e-6)


def test_random_pairs_bring_anchors_together_without_any_training() -> None:
    rng = np.random.default_rng(0)
    anchors = [randn(1, 64, seed=i) for i in range(8)]
    moments = [np.zeros_like(anchor) for anchor in anchors]
    mean = np.mean(anchors, axis=0)
    for _ in range(60):
        order = rng.permutation(8)
        for one, other in order.reshape(4, 2):
            thetas = anchors[one].copy(), anchors[other].copy()
            pairwise_step(anchors[one], moments[one], thetas[0].copy(), thetas[1].copy(), lr=ETA, momentum=MU)
            pairwise_step(anchors[other], moments[other], thetas[1].copy(), thetas[0].copy(), lr=ETA, momentum=MU)
    assert np.var(anchors, axis=0).mean() < 1e-6
    np.testing.assert_allclose(anchors[0], mean, atol=1e-3)


def test_chunks_can_be_stepped_separately_with_the_same_bits() -> None:
    whole, chunked = ([randn(4, 64, seed=seed) for seed in range(4)] for _ in range(2))
    pairwise_step(*whole, lr=ETA, momentum=MU)
    for start in range(0, 4, 3):
        pairwise_step(*(values[start : start + 3] for values in chunked), lr=ETA, momentum=MU)
    for values, wanted in zip(chunked, whole, strict=True):
        assert values.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("partners", [0, 1])
def test_passes_over_a_model_copy_a_chunk_at_a_time(partners: int) -> None:
    anchor, moment, own, *theirs = (randn(20 * CHUNK_BLOCKS, 64, seed=seed) for seed in range(3 + partners))
    tracemalloc.start()
    squared_distance(anchor, own)
    pairwise_step(anchor, moment, own, theirs[0] if theirs else None, lr=ETA, momentum=MU)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Two chunks in double precision.
    assert peak_bytes < 5 * own[:CHUNK_BLOCKS].nbytes


def test_spread_estimates_how_far_a_peer_is_from_the_mean_of_all() -> None:
    mean = randn(400, 64, seed=0)
    peers = [mean + randn(400, 64, seed=1 + i, scale=0.1) for i in range(2)]
    assert spread(*peers) == pytest.approx(0.1, rel=0.05)
    assert spread(mean, mean) == 0 == spread(np.zeros_like(mean), mean)
    assert squared_distance(mean, mean + 1) == pytest.approx(mean.size, rel=1e-5)


def test_a_first_partner_that_is_far_counts_as_three_times_what_we_moved() -> None:
    anchor, own, liar = np.zeros((2, 64), np.float32), randn(2, 64, seed=1), 1e9 * randn(2, 64, seed=2)
    scale = clip_scale(float(np.linalg.norm(own)), [], float(np.linalg.norm(liar)))
    moment = np.zeros_like(anchor)
    pairwise_step(anchor, moment, own.copy(), liar, lr=1.0, momentum=0.0, scale=scale)
    assert np.linalg.norm(2 * anchor - own) == pytest.approx(MOST_TIMES * np.linalg.norm(own), rel=1e-5)
    assert clip_scale(1.0, [], 2.9) == 1 == clip_scale(0.0, [], 0.0)


def test_what_most_partners_have_in_common_is_not_scaled_and_one_liar_is() -> None:
    # Late in a run peers move little, and their anchors are still apart.
    assert clip_scale(0.1, [5.0, 6.0, 7.0], 8.0) == 1
    assert clip_scale(0.1, [5.0, 1e9, 6.0], 1e9) == pytest.approx(18 / 1e9)
    assert clip_scale(0.1, [5.0, 1e9], 1e9) == pytest.approx(15 / 1e9)


def test_an_anchor_is_usual_if_it_is_near_the_median_of_all() -> None:
    rng = np.random.default_rng(0)
    true = rng.standard_normal(4096).astype(np.float32)
    honest = [(true + 0.3 * rng.standard_normal(4096)).astype(np.float32) for _ in range(5)]
    assert is_usual(honest[0], honest[1:])
    for lie in (np.zeros_like(true), -true, 1e6 * true, np.full_like(true, 1e12)):
        # A minority of liars gets its anchors taken no more than it has those of others refused.
        assert not is_usual(lie, honest[1:3])
        assert is_usual(honest[0], [honest[1], lie])
        assert is_usual(honest[0], [honest[1], honest[2], lie, lie])
