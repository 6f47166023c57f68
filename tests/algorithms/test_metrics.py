import itertools

import numpy as np
import pytest

from p2ptrain.algorithms.metrics import disagreement, pairwise_correlation, sample_indices


def some_vectors(peers: int = 5, size: int = 300) -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.standard_normal(size) + generator.standard_normal((peers, size)) + 3).astype(np.float32)


@pytest.mark.parametrize("peers", [2, 3, 8])
def test_correlation_is_the_mean_over_all_pairs(peers: int) -> None:
    vectors = some_vectors(peers)
    pairs = [np.corrcoef(one, other)[0, 1] for one, other in itertools.combinations(vectors, 2)]
    assert pairwise_correlation(vectors) == pytest.approx(np.mean(pairs))


def test_correlation_knows_nothing_of_scale_and_offset() -> None:
    vectors = some_vectors(2)
    assert pairwise_correlation([vectors[0], 3 * vectors[0] + 7]) == pytest.approx(1)
    assert pairwise_correlation([vectors[0], -vectors[0]]) == pytest.approx(-1)
    assert pairwise_correlation(vectors[::-1]) == pytest.approx(pairwise_correlation(vectors))


def test_a_constant_vector_correlates_with_nothing() -> None:
    assert pairwise_correlation([np.ones(10), np.arange(10)]) == 0


def test_disagreement_is_the_mean_variance() -> None:
    assert disagreement([[0, 1, 5], [2, 1, 9]]) == pytest.approx((1 + 0 + 4) / 3)
    assert disagreement(np.repeat(some_vectors(1), 4, axis=0)) == 0


def test_samples_are_sorted_distinct_and_the_same_everywhere() -> None:
    sample = sample_indices(1, 100_000, 500)
    assert len(sample) == 500
    assert np.all(np.diff(sample) > 0)
    assert 0 <= sample[0] <= sample[-1] < 100_000
    assert np.array_equal(sample, sample_indices(1, 100_000, 500))
    assert not np.array_equal(sample, sample_indices(2, 100_000, 500))
    assert sample_indices(1, 7, 500).tolist() == list(range(7))
