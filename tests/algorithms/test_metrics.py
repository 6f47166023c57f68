import itertools

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.averaging import weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.metrics import (
    disagreement,
    encoded_gram,
    gram,
    mean_cosine,
    mean_norm,
    pairwise_correlation,
    sample_indices,
)
from p2ptrain.errors import WireError


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


def some_gradients(peers: int, num_blocks: int = 6) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    common = generator.standard_normal((num_blocks, 64))
    return [(common + generator.standard_normal((num_blocks, 64))).astype(np.float32) for _ in range(peers)]


@pytest.mark.parametrize("peers", [2, 3, 8])
def test_mean_cosine_is_torchs_over_all_pairs(peers: int) -> None:
    gradients = some_gradients(peers)
    flat = [torch.from_numpy(gradient.reshape(-1)) for gradient in gradients]
    pairs = [torch.cosine_similarity(one, other, dim=0) for one, other in itertools.combinations(flat, 2)]
    assert mean_cosine(gram(gradients)) == pytest.approx(float(np.mean(pairs)), rel=1e-5)


def test_cosines_of_known_vectors() -> None:
    axes = list(np.eye(3, 64, dtype=np.float32))
    assert mean_cosine(gram(axes)) == 0
    assert mean_cosine(gram([axes[0], 5 * axes[0]])) == pytest.approx(1)
    assert mean_cosine(gram([axes[0], -2 * axes[0]])) == pytest.approx(-1)
    assert mean_cosine(gram([axes[0], axes[0], 0 * axes[0]])) == pytest.approx(1 / 3)


def test_mean_norm_is_the_norm_of_the_weighted_mean() -> None:
    gradients, weights = some_gradients(4), [1.0, 0.0, 3.0, 2.5]
    wire = codec("int8")
    encoded = [wire.encode(gradient) for gradient in gradients]
    mean = weighted_mean(list(zip(encoded, weights, strict=True)), wire, 6)
    assert mean_norm(encoded_gram(encoded, wire, 6, 6), weights) == pytest.approx(np.linalg.norm(mean), rel=1e-5)


def test_gram_matrices_of_parts_add_up() -> None:
    gradients = some_gradients(3)
    parts = gram([g[:2] for g in gradients]) + gram([g[2:] for g in gradients])
    np.testing.assert_allclose(parts, gram(gradients), rtol=1e-12)
    assert parts.shape == (3, 3)


def test_the_norm_of_the_mean_of_unrelated_gradients_falls_as_one_over_the_root_of_k() -> None:
    """DiLoCo, section 6.2."""
    generator = np.random.default_rng(2)
    gradients = [generator.standard_normal((100, 64)).astype(np.float32) for _ in range(16)]
    norms = [mean_norm(gram(gradients[:k]), [1.0] * k) * k**0.5 for k in (1, 4, 16)]
    assert norms == pytest.approx([80, 80, 80], rel=0.05)


@pytest.mark.filterwarnings("error")
def test_statistics_of_any_finite_gradients_are_finite() -> None:
    largest = np.full((4, 64), np.finfo(np.float32).max, np.float32)
    products = gram([largest, -largest, 0 * largest])
    assert mean_norm(products, [1.0, 1.0, 0.0]) == 0
    assert mean_cosine(products) == pytest.approx(-1 / 3)


def test_a_gram_matrix_of_bytes_that_do_not_decode_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="bytes for"):
        encoded_gram([b"", b""], codec("int8"), 1, 1)
