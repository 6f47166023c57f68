import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.outer import outer_step, scaled_interval, token_weights, weighted_mean
from p2ptrain.errors import WireError


def randn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("lr", "momentum_factor"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.99), (0.7, 0.0), (1.0, 0.0)])
def test_outer_step_is_torchs_nesterov_sgd(lr: float, momentum_factor: float) -> None:
    """2000 blocks: more than one of the chunks that the step works in."""
    anchor = randn(2000, 64, seed=0)
    momentum = np.zeros_like(anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum_factor, nesterov=momentum_factor > 0)
    for step in range(20):
        gradient = randn(2000, 64, seed=step + 1)
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        outer_step(anchor, momentum, gradient, lr, momentum_factor)
        torch.testing.assert_close(torch.from_numpy(anchor), parameter.detach(), rtol=1e-5, atol=1e-5)


def test_outer_step_rounds_every_operation_on_its_own() -> None:
    anchor, momentum, gradient = (randn(3, 64, seed=seed) for seed in (1, 2, 3))
    lr, factor = np.float32(0.7), np.float32(0.9)
    expected_anchor, expected_momentum = anchor.copy(), momentum.copy()
    for place in np.ndindex(anchor.shape):
        m = np.float32(np.float32(factor * momentum[place]) + gradient[place])
        update = np.float32(lr * np.float32(gradient[place] + np.float32(factor * m)))
        expected_anchor[place], expected_momentum[place] = anchor[place] - update, m
    outer_step(anchor, momentum, gradient, 0.7, 0.9)
    assert anchor.tobytes() == expected_anchor.tobytes()
    assert momentum.tobytes() == expected_momentum.tobytes()


def test_outer_step_is_elementwise_so_parts_can_land_alone() -> None:
    whole, parts = ([randn(1500, 64, seed=seed) for seed in (1, 2, 3)] for _ in range(2))
    outer_step(*whole, 0.7, 0.9)
    for start, stop in ((0, 1), (1, 700), (700, 1500)):
        outer_step(*(array[start:stop] for array in parts), 0.7, 0.9)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(whole, parts, strict=True))


def test_outer_step_only_reads_the_gradient() -> None:
    gradient = randn(2, 64, seed=1)
    kept = gradient.copy()
    outer_step(randn(2, 64, seed=2), randn(2, 64, seed=3), gradient, 0.7, 0.9)
    assert np.array_equal(gradient, kept)


def test_without_momentum_the_buffer_is_left_alone() -> None:
    anchor, momentum, gradient = (randn(2, 64, seed=seed) for seed in (1, 2, 3))
    kept, expected = momentum.copy(), anchor - gradient
    outer_step(anchor, momentum, gradient, 1.0, 0.0)
    assert np.array_equal(momentum, kept)
    assert np.array_equal(anchor, expected)


def test_outer_sgd_with_lr_1_is_fedavg() -> None:
    """DiLoCo, section 2: the anchor becomes the (weighted) mean of the workers' weights."""
    anchor = randn(5, 64, seed=0)
    workers = [anchor + 0.1 * randn(5, 64, seed=seed) for seed in (1, 2, 3)]
    weights = [1.0, 2.0, 5.0]
    plain = codec("none")
    encoded = [(plain.encode(anchor - worker), weight) for worker, weight in zip(workers, weights, strict=True)]
    outer_step(anchor, np.zeros_like(anchor), weighted_mean(encoded, plain, 5), 1.0, 0.0)
    np.testing.assert_allclose(anchor, np.average(workers, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


def test_one_inner_sgd_step_is_data_parallel_training() -> None:
    """DiLoCo, section 2: H = 1 with inner SGD equals one step on the mean gradient."""
    anchor = randn(4, 64, seed=0)
    gradients = [randn(4, 64, seed=seed) for seed in (1, 2, 3, 4)]
    expected = anchor - 0.05 * np.mean(gradients, axis=0)
    plain = codec("none")
    encoded = [(plain.encode(anchor - (anchor - np.float32(0.05) * gradient)), 1.0) for gradient in gradients]
    outer_step(anchor, np.zeros_like(anchor), weighted_mean(encoded, plain, 4), 1.0, 0.0)
    np.testing.assert_allclose(anchor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "distance"), [("none", 1e-4), ("fp16", 1e-3), ("int8", 1e-2)])
def test_diloco_converges_on_least_squares_with_every_codec(name: str, distance: float) -> None:
    """Four workers with different targets and 10 local steps a round end at the mean of the targets."""
    targets = [randn(2, 64, seed=seed) for seed in (1, 2, 3, 4)]
    optimum = np.mean(targets, axis=0)
    anchor, momentum = np.zeros((2, 64), np.float32), np.zeros((2, 64), np.float32)
    chosen = codec(name)
    for _ in range(100):
        encoded = []
        for target in targets:
            local = anchor.copy()
            for _ in range(10):
                local -= np.float32(0.05) * (local - target)
            encoded.append((chosen.encode(anchor - local), 1.0))
        outer_step(anchor, momentum, weighted_mean(encoded, chosen, 2), 0.7, 0.9)
    assert np.abs(anchor - optimum).max() < distance


@pytest.mark.parametrize("name", ["int8", "fp16", "none"])
def test_weighted_mean_agrees_with_the_mean_in_double_precision(name: str) -> None:
    chosen = codec(name)
    weights = [3.0, 0.0, 10.0, 1.0, 7.0]
    encoded = [(chosen.encode(randn(9, 64, seed=seed)), weight) for seed, weight in enumerate(weights)]
    decoded = [chosen.decode(data, 9).astype(np.float64) for data, _ in encoded]
    mean = weighted_mean(encoded, chosen, 9)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, np.average(decoded, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


def test_weighted_mean_of_one_is_what_it_sent() -> None:
    data = codec("int8").encode(randn(3, 64, seed=0))
    mean = weighted_mean([(data, 123.0)], codec("int8"), 3)
    assert mean.tobytes() == codec("int8").decode(data, 3).tobytes()


def test_weighted_mean_is_the_same_in_parts_and_repeats_itself() -> None:
    """Reducers average parts: their slices must be the bits of the whole."""
    chosen = codec("fp16")
    gradients = [randn(20, 64, seed=seed) for seed in range(3)]
    weights = [0.1, 0.7, 12.3]

    def mean_of(part: slice) -> bytes:
        encoded = [(chosen.encode(g[part]), weight) for g, weight in zip(gradients, weights, strict=True)]
        return weighted_mean(encoded, chosen, len(gradients[0][part])).tobytes()

    assert mean_of(slice(0, 20)) == mean_of(slice(0, 7)) + mean_of(slice(7, 20)) == mean_of(slice(None))


def test_weighted_mean_counts_only_the_ratio_of_weights() -> None:
    encoded = [codec("none").encode(randn(2, 64, seed=seed)) for seed in range(3)]
    small = weighted_mean(list(zip(encoded, [1.0, 2.0, 3.0], strict=True)), codec("none"), 2)
    large = weighted_mean(list(zip(encoded, [1024.0, 2048.0, 3072.0], strict=True)), codec("none"), 2)
    assert small.tobytes() == large.tobytes()


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0], [1e308, 1e308], []])
def test_weights_that_are_no_token_counts_are_a_wire_error(weights: list[float]) -> None:
    data = codec("none").encode(randn(1, 64, seed=0))
    with pytest.raises(WireError, match="weights"):
        weighted_mean([(data, weight) for weight in weights], codec("none"), 1)


@pytest.mark.filterwarnings("error")
def test_a_mean_beyond_float32_is_a_wire_error_and_any_other_can_be_encoded() -> None:
    """The weights' float32 roundings may add up to a little more than 1."""
    data = codec("none").encode(np.full((1, 64), np.finfo(np.float32).max, np.float32))
    weights = next(w for n in range(3, 64) if sum(np.full(n, 1 / n, np.float32)) > 1 for w in [[1.0] * n])
    with pytest.raises(WireError, match="not finite"):
        weighted_mean([(data, weight) for weight in weights], codec("none"), 1)
    lowest = b"\xff\x7b" + b"\x80" * 64
    mean = weighted_mean([(lowest, weight) for weight in weights], codec("int8"), 1)
    assert np.isfinite(codec("int8").decode(codec("int8").encode(mean), 1)).all()


def test_bytes_that_do_not_decode_are_a_wire_error() -> None:
    data = codec("int8").encode(randn(1, 64, seed=0))
    with pytest.raises(WireError, match="bytes for"):
        weighted_mean([(data, 1.0), (data[:-1], 1.0)], codec("int8"), 1)


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [
        ([100, 100, 100], [100, 100, 100]),
        ([50, 100, 150], [50, 100, 150]),
        ([100, 100, 1000], [100, 100, 200]),
        ([0, 0, 0], [1, 1, 1]),
        ([0, 0, 70], [0, 0, 70]),
        ([0, 10, 20, 90], [0, 10, 20, 40]),
        ([5], [5]),
        ([], []),
    ],
)
def test_token_weights(tokens: list[int], weights: list[float]) -> None:
    assert token_weights(tokens) == weights


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=64))
def test_token_weights_are_usable_capped_and_keep_the_order(tokens: list[int]) -> None:
    weights = token_weights(tokens)
    assert sum(weights) > 0
    if any(tokens):
        assert max(weights) <= 2 * statistics.median(count for count in tokens if count)
        assert all((one <= other) or (a > b) for a, one in zip(tokens, weights, strict=True)
                   for b, other in zip(tokens, weights, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "median_speed", "interval"),
    [
        (10.0, 10.0, 200),
        (10.9, 10.0, 200),
        (9.1, 10.0, 200),
        (12.0, 10.0, 240),
        (5.0, 10.0, 100),
        (40.0, 10.0, 800),
        (0.001, 10.0, 1),
        (0.0, 10.0, 200),
        (10.0, 0.0, 200),
        (-1.0, 10.0, 200),
        (math.nan, 10.0, 200),
        (math.inf, 10.0, 200),
        (1e300, 1e-300, 200),
    ],
)
def test_scaled_interval(speed: float, median_speed: float, interval: int) -> None:
    assert scaled_interval(200, speed, median_speed) == interval
