import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.algorithms.averaging import disjoint_mean, token_weights, weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.errors import WireError

MEANS = (weighted_mean, disjoint_mean)


def randn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["int8", "fp16", "none"])
def test_weighted_mean_agrees_with_the_mean_in_double_precision(name: str) -> None:
    chosen = codec(name)
    weights = [3.0, 0.0, 10.0, 1.0, 7.0]
    encoded = [(chosen.encode(randn(9, 64, seed=seed)), weight) for seed, weight in enumerate(weights)]
    decoded = [chosen.decode(data, 9).astype(np.float64) for data, _ in encoded]
    mean = weighted_mean(encoded, chosen, 9)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, np.average(decoded, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean_of", MEANS)
def test_the_mean_of_one_is_what_it_sent(mean_of) -> None:
    data = codec("int8").encode(randn(3, 64, seed=0))
    mean = mean_of([(data, 123.0)], codec("int8"), 3)
    assert mean.tobytes() == codec("int8").decode(data, 3).tobytes()


@pytest.mark.parametrize("mean_of", MEANS)
def test_a_mean_is_the_same_in_parts_and_repeats_itself(mean_of) -> None:
    """Reducers average parts: the mean of a part must be bit for bit that part of the whole mean."""
    chosen = codec("fp16")
    gradients = [randn(20, 64, seed=seed) for seed in range(3)]
    weights = [0.1, 0.7, 12.3]

    def bytes_of(part: slice) -> bytes:
        encoded = [(chosen.encode(g[part]), weight) for g, weight in zip(gradients, weights, strict=True)]
        return mean_of(encoded, chosen, len(gradients[0][part])).tobytes()

    assert bytes_of(slice(0, 20)) == bytes_of(slice(0, 7)) + bytes_of(slice(7, 20)) == bytes_of(slice(None))


@pytest.mark.parametrize("mean_of", MEANS)
def test_a_mean_counts_only_the_ratio_of_weights(mean_of) -> None:
    encoded = [codec("none").encode(randn(2, 64, seed=seed)) for seed in range(3)]
    small = mean_of(list(zip(encoded, [1.0, 2.0, 3.0], strict=True)), codec("none"), 2)
    large = mean_of(list(zip(encoded, [1024.0, 2048.0, 3072.0], strict=True)), codec("none"), 2)
    assert small.tobytes() == large.tobytes()


@pytest.mark.parametrize("mean_of", MEANS)
@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0], [1e308, 1e308], []])
def test_weights_that_are_no_token_counts_are_a_wire_error(mean_of, weights: list[float]) -> None:
    data = codec("none").encode(randn(1, 64, seed=0))
    with pytest.raises(WireError, match="weights"):
        mean_of([(data, weight) for weight in weights], codec("none"), 1)


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


@pytest.mark.parametrize("mean_of", MEANS)
def test_bytes_that_do_not_decode_are_a_wire_error(mean_of) -> None:
    data = codec("int8").encode(randn(1, 64, seed=0))
    with pytest.raises(WireError, match="bytes for"):
        mean_of([(data, 1.0), (data[:-1], 1.0)], codec("int8"), 1)


def plain_disjoint_mean(columns: np.ndarray, weights: list[float]) -> np.ndarray:
    """TIES' disjoint merge of (k, n) values in double precision, as a loop over the positions."""
    mean = np.zeros(columns.shape[1])
    for place, values in enumerate(columns.T.astype(np.float64)):
        elected = np.sign(sum(w * v for w, v in zip(weights, values, strict=True)))
        agreeing = [(w, v) for w, v in zip(weights, values, strict=True) if np.sign(v) == elected and elected]
        if agreeing:
            mean[place] = sum(w * v for w, v in agreeing) / sum(w for w, _ in agreeing)
    return mean


@pytest.mark.parametrize("name", ["int8", "fp16", "none"])
def test_disjoint_mean_agrees_with_the_plain_reference(name: str) -> None:
    chosen = codec(name)
    weights = [3.0, 0.5, 10.0, 1.0, 7.0]
    encoded = [(chosen.encode(randn(9, 64, seed=seed)), weight) for seed, weight in enumerate(weights)]
    decoded = np.stack([chosen.decode(data, 9).reshape(-1) for data, _ in encoded])
    mean = disjoint_mean(encoded, chosen, 9)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean.reshape(-1), plain_disjoint_mean(decoded, weights), rtol=1e-5, atol=1e-6)


def test_where_signs_agree_the_disjoint_mean_is_the_weighted_mean() -> None:
    plain = codec("none")
    encoded = [(plain.encode(np.abs(randn(3, 64, seed=seed)) * -1), 1.0 + seed) for seed in range(4)]
    np.testing.assert_allclose(disjoint_mean(encoded, plain, 3), weighted_mean(encoded, plain, 3), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "weights", "mean"),
    [
        ([1.0, -4.0], [1.0, 1.0], -4.0),
        ([1.0, -4.0], [5.0, 1.0], 1.0),
        ([2.0, -2.0], [1.0, 1.0], 0.0),
        ([3.0, 0.0, 1.0], [1.0, 9.0, 1.0], 2.0),
        ([3.0, 1.0, -2.0], [1.0, 3.0, 1.0], 1.5),
        ([-3.0, 9.0], [1.0, 0.0], -3.0),
    ],
)
def test_the_sign_with_more_weighted_mass_is_elected(values: list[float], weights: list[float], mean: float) -> None:
    plain = codec("none")
    encoded = [(plain.encode(np.full((1, 64), value, np.float32)), w) for value, w in zip(values, weights, strict=True)]
    np.testing.assert_allclose(disjoint_mean(encoded, plain, 1), mean, rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_disjoint_mean_beyond_float32_is_a_wire_error() -> None:
    largest = np.full((1, 64), np.finfo(np.float32).max, np.float32)
    data = codec("none").encode(largest)
    for n in range(2, 64):
        shares = np.full(n, 1 / n, np.float32)
        encoded = [(data, 1.0)] * n
        if sum(shares) > 1:
            with pytest.raises(WireError, match="not finite"):
                disjoint_mean(encoded, codec("none"), 1)
            return
    raise AssertionError("no number of contributors has shares that add up to more than 1")


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
