import contextlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.algorithms.averaging import weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.robust import clipped_mean, geometric_median, num_trimmed, trimmed_mean
from p2ptrain.errors import WireError

MEANS = (clipped_mean, trimmed_mean, geometric_median)
PLAIN = codec("none")
WEIGHTS = [3.0, 1.0, 2.0, 1.0, 4.0, 2.0, 1.0, 4.0]


def randn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gradients(count: int, blocks: int = 5) -> list[np.ndarray]:
    """Outer gradients with a common direction, as those of one model have."""
    return [randn(blocks, 64, seed=99) + randn(blocks, 64, seed=seed) for seed in range(count)]


def encoded(values: Sequence[np.ndarray], weights: Sequence[float] = WEIGHTS) -> list[tuple[bytes, float]]:
    return [(PLAIN.encode(one), weight) for one, weight in zip(values, weights, strict=False)]


def plain_trimmed(x: np.ndarray, w: np.ndarray, dropped: int) -> np.ndarray:
    """The definition, position by position, in double precision."""
    mean = np.zeros(x.shape[1])
    for at in range(x.shape[1]):
        kept = np.argsort(x[:, at], kind="stable")[dropped : len(x) - dropped]
        mean[at] = np.average(x[kept, at], weights=w[kept])
    return mean


def plain(mean_of, values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Each mean as its paper writes it, in double precision."""
    x = np.stack([one.reshape(-1) for one in values]).astype(np.float64)
    w = np.array(weights[: len(x)]) / sum(weights[: len(x)])
    x, w = x[w > 0], w[w > 0]
    if mean_of is trimmed_mean or len(x) < 3:
        return plain_trimmed(x, w, num_trimmed(len(x)))
    v = np.median(x, axis=0)
    for _ in range(3):
        d = np.linalg.norm(x - v, axis=1)
        tau = np.sort(d)[(len(d) - 1) // 2]
        if mean_of is clipped_mean:
            v = v + sum(w[i] * (x[i] - v) * min(1.0, tau / d[i]) for i in range(len(x)) if d[i] > 0)
        else:
            beta = w / np.maximum(1e-6 * tau, d)
            v = (beta @ x) / beta.sum()
    return v


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("mean_of", MEANS)
def test_it_agrees_with_the_reference_in_double_precision(mean_of, count: int) -> None:
    values = gradients(count)
    values[-1] = -5 * values[-1]
    mean = mean_of(encoded(values), PLAIN, 5)
    assert mean.dtype == np.float32
    assert mean.shape == (5, 64)
    np.testing.assert_allclose(mean.reshape(-1), plain(mean_of, values, WEIGHTS), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mean_of", MEANS)
def test_of_two_contributors_it_is_the_weighted_mean(mean_of) -> None:
    sent = encoded([*gradients(2), np.full((5, 64), 1e6, np.float32)], [2.0, 1.0, 0.0])
    np.testing.assert_allclose(mean_of(sent, PLAIN, 5), weighted_mean(sent, PLAIN, 5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mean_of", MEANS)
def test_a_contributor_without_weight_has_no_say(mean_of) -> None:
    """It does not count in medians and ranks either: a liar cannot vote with what it does not stake."""
    values = [*gradients(4), *(np.full((5, 64), 1e6, np.float32) for _ in range(9))]
    weights = [3.0, 1.0, 2.0, 1.0, *[0.0] * 9]
    with_liars = mean_of(encoded(values, weights), PLAIN, 5)
    assert with_liars.tobytes() == mean_of(encoded(values[:4], weights[:4]), PLAIN, 5).tobytes()


@pytest.mark.parametrize("name", ["int8", "int4", "fp16", "none"])
@pytest.mark.parametrize("mean_of", MEANS)
def test_the_mean_of_one_is_what_it_sent(mean_of, name: str) -> None:
    data = codec(name).encode(randn(3, 64, seed=0))
    mean = mean_of([(data, 123.0)], codec(name), 3)
    assert mean.tobytes() == codec(name).decode(data, 3).tobytes()


@pytest.mark.parametrize("mean_of", MEANS)
def test_it_repeats_itself_and_counts_only_the_ratio_of_weights(mean_of) -> None:
    values = gradients(8)
    first = mean_of(encoded(values), PLAIN, 5)
    again = mean_of(encoded(values, [1024 * weight for weight in WEIGHTS]), PLAIN, 5)
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("mean_of", MEANS)
def test_signed_zeros_and_equal_values_leave_no_choice(mean_of) -> None:
    """Sorting may order 0.0 and -0.0 either way; the bits of the mean must not depend on it."""
    zeros = [np.zeros((1, 64), np.float32), np.full((1, 64), -0.0, np.float32)]
    for order in ([0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]):
        mean = mean_of(encoded([zeros[i] for i in order]), PLAIN, 1)
        assert mean.tobytes() == bytes(256)


@pytest.mark.parametrize("mean_of", MEANS)
@pytest.mark.parametrize("scale", [-5.0, 1e6, -1e30])
@pytest.mark.parametrize("liars", [1, 2])
def test_two_of_eight_cannot_move_it_beyond_the_honest_spread(mean_of, scale: float, liars: int) -> None:
    values = gradients(8)
    honest = values[: 8 - liars]
    lying = [np.float32(scale) * one for one in values[8 - liars :]]
    mean = mean_of(encoded([*honest, *lying], [1.0] * 8), PLAIN, 5)
    middle = np.mean(honest, axis=0)
    spread = max(float(np.linalg.norm(one - middle)) for one in honest)
    assert np.linalg.norm(mean - middle) < spread
    assert np.linalg.norm(np.mean([*honest, *lying], axis=0, dtype=np.float64) - middle) > 0.5 * spread


@pytest.mark.parametrize("mean_of", MEANS)
def test_descent_converges_with_two_liars_of_eight_where_the_mean_does_not(mean_of) -> None:
    """Gradient descent on a quadratic with noisy peers; the liars send -5 times their gradient, as of -5 Δ."""
    target = randn(2, 64, seed=1)

    def distance_with(used) -> float:
        weights = np.zeros((2, 64), np.float32)
        for step in range(60):
            noise = [0.1 * randn(2, 64, seed=1000 + 8 * step + peer) for peer in range(8)]
            sent = [weights - target + one for one in noise]
            sent[6:] = [-5 * one for one in sent[6:]]
            weights -= np.float32(0.3) * used(encoded(sent, [1.0] * 8), PLAIN, 2)
        return float(np.linalg.norm(weights - target))

    assert distance_with(mean_of) < 1.0 < 10.0 < distance_with(weighted_mean)


@pytest.mark.parametrize("mean_of", MEANS)
def test_equal_contributions_are_their_mean(mean_of) -> None:
    value = randn(2, 64, seed=0)
    np.testing.assert_allclose(mean_of(encoded([value] * 8), PLAIN, 2), value, rtol=1e-6)


@pytest.mark.parametrize("mean_of", MEANS)
@given(shift=st.floats(-1e3, 1e3), count=st.integers(1, 8))
def test_what_all_add_is_added_to_the_mean(mean_of, shift: float, count: int) -> None:
    values = gradients(count, blocks=1)
    moved = mean_of(encoded([one + np.float32(shift) for one in values]), PLAIN, 1)
    np.testing.assert_allclose(moved - np.float32(shift), mean_of(encoded(values), PLAIN, 1), atol=2e-3)


@given(st.integers(3, 12), st.data())
def test_a_trimmed_mean_lies_between_honest_values_whatever_the_liars_send(count: int, data) -> None:
    lies = data.draw(st.lists(st.floats(-1e9, 1e9, width=32), min_size=1, max_size=num_trimmed(count)))
    honest = np.stack(gradients(count - len(lies), blocks=1))
    values = [*honest, *(np.full((1, 64), lie, np.float32) for lie in lies)]
    mean = trimmed_mean(encoded(values, [1.0] * count), PLAIN, 1)
    assert (honest.min(axis=0) - 1e-5 <= mean).all()
    assert (mean <= honest.max(axis=0) + 1e-5).all()


@pytest.mark.parametrize(("count", "liars"), [(1, 0), (2, 0), (3, 1), (4, 1), (7, 1), (8, 2), (64, 16)])
def test_how_many_are_trimmed(count: int, liars: int) -> None:
    assert num_trimmed(count) == liars


@pytest.mark.parametrize("mean_of", MEANS)
def test_where_the_guarantee_ends(mean_of) -> None:
    """Five of eight that agree are the mean. What no robust mean prevents is said in a test, too."""
    lie = np.full((5, 64), 1e3, np.float32)
    mean = mean_of(encoded([*gradients(3), *[lie] * 5], [1.0] * 8), PLAIN, 5)
    assert mean.min() > 500


@pytest.mark.parametrize("mean_of", MEANS)
@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0], []])
def test_weights_that_are_no_token_counts_are_a_wire_error(mean_of, weights: list[float]) -> None:
    with pytest.raises(WireError, match="weights"):
        mean_of([(PLAIN.encode(randn(1, 64, seed=0)), weight) for weight in weights], PLAIN, 1)


@pytest.mark.parametrize("mean_of", MEANS)
def test_bytes_that_do_not_decode_are_a_wire_error_even_without_weight(mean_of) -> None:
    data = codec("int8").encode(randn(1, 64, seed=0))
    with pytest.raises(WireError, match="bytes for"):
        mean_of([(data, 1.0), (data[:-1], 0.0)], codec("int8"), 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mean_of", MEANS)
def test_values_at_the_end_of_float32_give_a_finite_mean_or_a_wire_error(mean_of) -> None:
    largest = np.finfo(np.float32).max
    for signs in ([1, 1, 1], [1, -1, 1, -1], [1, 0, 0, -1], [1, 0, 0, 0, 0]):
        values = [np.full((1, 64), sign * largest, np.float32) for sign in signs]
        with contextlib.suppress(WireError):
            assert np.isfinite(mean_of(encoded(values, [1.0] * len(values)), PLAIN, 1)).all()
