import numpy as np
import pytest
import torch

from p2ptrain.algorithms.averaging import weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step


def randn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zeros(optimizer: str, like: np.ndarray) -> list[np.ndarray]:
    return [np.zeros_like(like) for _ in range(OUTER_OPTIMIZERS[optimizer].num_moments)]


def start(optimizer: str, num_blocks: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Anchor, moments as of an earlier round, and gradient."""
    moments = [np.abs(randn(num_blocks, 64, seed=3 + i)) for i in range(OUTER_OPTIMIZERS[optimizer].num_moments)]
    return randn(num_blocks, 64, seed=1), moments, randn(num_blocks, 64, seed=2)


def average(anchor: np.ndarray, workers: list[np.ndarray], weights: list[float]) -> None:
    """One round of plain averaging: the anchor moves by the mean of anchor - worker."""
    plain = codec("none")
    encoded = [(plain.encode(anchor - worker), weight) for worker, weight in zip(workers, weights, strict=True)]
    mean = weighted_mean(encoded, plain, len(anchor))
    outer_step("sgd", anchor, [], mean, lr=1.0, momentum=0.0, round_=0)


def torch_optimizer(name: str, parameter: torch.nn.Parameter, lr: float, momentum: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam([parameter], lr=lr, betas=(momentum, 0.95), eps=0.1)
    return torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=name == "nesterov")


@pytest.mark.parametrize(
    ("optimizer", "lr", "momentum"),
    [
        ("sgd", 1.0, 0.0),
        ("sgd", 0.5, 0.0),
        ("sgdm", 0.3, 0.9),
        ("sgdm", 1.0, 0.5),
        ("nesterov", 0.7, 0.9),
        ("nesterov", 1.0, 0.5),
        ("nesterov", 0.1, 0.99),
        ("adam", 0.3, 0.9),
        ("adam", 0.7, 0.0),
    ],
)
def test_outer_step_is_torchs(optimizer: str, lr: float, momentum: float) -> None:
    """2000 blocks are more than one chunk of the outer step."""
    anchor = randn(2000, 64, seed=0)
    moments = zeros(optimizer, anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    reference = torch_optimizer(optimizer, parameter, lr, momentum)
    for step in range(20):
        gradient = randn(2000, 64, seed=step + 1)
        parameter.grad = torch.from_numpy(gradient.copy())
        reference.step()
        outer_step(optimizer, anchor, moments, gradient, lr=lr, momentum=momentum, round_=step)
        torch.testing.assert_close(torch.from_numpy(anchor), parameter.detach(), rtol=1e-5, atol=1e-5)


def test_the_optimizers_are_those_of_table_5() -> None:
    values = {name: (o.lr, o.momentum, o.num_moments) for name, o in OUTER_OPTIMIZERS.items()}
    assert values == {"sgd": (0.5, 0, 0), "sgdm": (0.3, 0.9, 1), "nesterov": (0.7, 0.9, 1), "adam": (0.3, 0.9, 2)}
    assert (OUTER_OPTIMIZERS["adam"].beta2, OUTER_OPTIMIZERS["adam"].eps) == (0.95, 0.1)


def test_nesterov_rounds_every_operation_on_its_own() -> None:
    anchor, (momentum,), gradient = start("nesterov", 3)
    lr, factor = np.float32(0.7), np.float32(0.9)
    expected_anchor, expected_momentum = anchor.copy(), momentum.copy()
    for place in np.ndindex(anchor.shape):
        m = np.float32(np.float32(factor * momentum[place]) + gradient[place])
        update = np.float32(lr * np.float32(gradient[place] + np.float32(factor * m)))
        expected_anchor[place], expected_momentum[place] = anchor[place] - update, m
    outer_step("nesterov", anchor, [momentum], gradient, lr=0.7, momentum=0.9, round_=0)
    assert anchor.tobytes() == expected_anchor.tobytes()
    assert momentum.tobytes() == expected_momentum.tobytes()


def test_adam_rounds_every_operation_on_its_own() -> None:
    anchor, (m, v), gradient = start("adam", 3)
    beta1, beta2, rest1, rest2 = (np.float32(x) for x in (0.9, 0.95, 1 - 0.9, 1 - 0.95))
    step, root = np.float32(0.3 / (1 - 0.9 * 0.9)), np.float32(1 / (1 - 0.95 * 0.95) ** 0.5)
    expected = [array.copy() for array in (anchor, m, v)]
    for place in np.ndindex(anchor.shape):
        g = gradient[place]
        first = np.float32(np.float32(beta1 * m[place]) + np.float32(g * rest1))
        second = np.float32(np.float32(beta2 * v[place]) + np.float32(np.float32(g * g) * rest2))
        below = np.float32(np.float32(np.sqrt(second) * root) + np.float32(0.1))
        for array, value in zip(
            expected, (anchor[place] - np.float32(first / below) * step, first, second), strict=True
        ):
            array[place] = value
    outer_step("adam", anchor, [m, v], gradient, lr=0.3, momentum=0.9, round_=1)
    assert [array.tobytes() for array in (anchor, m, v)] == [array.tobytes() for array in expected]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-30, 1e30, 3.4e38])
def test_adams_moments_stay_finite_and_normal_at_the_ends_of_float32(magnitude: float) -> None:
    """So that no weight freezes, and a CPU that flushes subnormals keeps the same second moment."""
    anchor, moments = np.zeros((1, 64), np.float32), zeros("adam", np.zeros((1, 64), np.float32))
    gradient = np.full((1, 64), magnitude, np.float32)
    for round_ in (0, 1, 2, 10**9):
        outer_step("adam", anchor, moments, gradient, lr=0.3, momentum=0.9, round_=round_)
    assert all(np.isfinite(array).all() for array in (anchor, *moments))
    assert moments[1].min() >= np.finfo(np.float32).tiny
    assert magnitude or not anchor.any()


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_outer_step_is_elementwise_so_parts_can_land_alone(optimizer: str) -> None:
    (whole, whole_moments, gradient), (parts, part_moments, _) = start(optimizer, 1500), start(optimizer, 1500)
    settings = {"lr": 0.7, "momentum": 0.9, "round_": 4}
    outer_step(optimizer, whole, whole_moments, gradient, **settings)
    for low, high in ((0, 1), (1, 700), (700, 1500)):
        outer_step(optimizer, parts[low:high], [m[low:high] for m in part_moments], gradient[low:high], **settings)
    assert whole.tobytes() == parts.tobytes()
    assert [m.tobytes() for m in whole_moments] == [m.tobytes() for m in part_moments]


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_outer_step_only_reads_the_gradient(optimizer: str) -> None:
    anchor, moments, gradient = start(optimizer, 2)
    kept = gradient.copy()
    outer_step(optimizer, anchor, moments, gradient, lr=0.7, momentum=0.9, round_=0)
    assert np.array_equal(gradient, kept)


def test_moments_that_the_optimizer_does_not_have_are_left_alone() -> None:
    """The last round of a run is a plain average, whatever moments the optimizer has kept."""
    anchor, moments, gradient = start("adam", 2)
    kept, expected = [moment.copy() for moment in moments], anchor - gradient
    outer_step("sgd", anchor, moments, gradient, lr=1.0, momentum=0.9, round_=0)
    assert np.array_equal(moments, kept)
    assert np.array_equal(anchor, expected)


def test_too_few_moments_are_a_defect_of_the_caller() -> None:
    anchor, moments, gradient = start("nesterov", 1)
    with pytest.raises(AssertionError):
        outer_step("adam", anchor, moments, gradient, lr=0.7, momentum=0.9, round_=0)


def test_outer_sgd_with_lr_1_is_fedavg() -> None:
    """DiLoCo, section 2: the anchor becomes the (weighted) mean of the workers' weights."""
    anchor = randn(5, 64, seed=0)
    workers = [anchor + 0.1 * randn(5, 64, seed=seed) for seed in (1, 2, 3)]
    weights = [1.0, 2.0, 5.0]
    average(anchor, workers, weights)
    np.testing.assert_allclose(anchor, np.average(workers, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


def test_one_round_of_plain_averaging_is_a_soup_of_models_trained_alone() -> None:
    """DiLoCo, section 2: with a single round (T = 1) the result is the mean of independently trained models."""
    anchor = randn(2, 64, seed=0)
    models = []
    for target in (randn(2, 64, seed=seed) for seed in (1, 2, 3)):
        model = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
        optimizer = torch.optim.AdamW([model], lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            (model - torch.from_numpy(target)).square().sum().backward()
            optimizer.step()
        models.append(model.detach().numpy())
    average(anchor, models, [1.0] * 3)
    np.testing.assert_allclose(anchor, np.mean(models, axis=0), rtol=1e-5, atol=1e-6)


def test_one_inner_sgd_step_is_data_parallel_training() -> None:
    """DiLoCo, section 2: H = 1 with inner SGD equals one step on the mean gradient."""
    anchor = randn(4, 64, seed=0)
    gradients = [randn(4, 64, seed=seed) for seed in (1, 2, 3, 4)]
    expected = anchor - 0.05 * np.mean(gradients, axis=0)
    average(anchor, [anchor - np.float32(0.05) * gradient for gradient in gradients], [1.0] * 4)
    np.testing.assert_allclose(anchor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "name", "distance"),
    [
        ("nesterov", "none", 1e-4),
        ("nesterov", "fp16", 1e-3),
        ("nesterov", "int8", 1e-2),
        ("sgd", "none", 1e-4),
        ("sgdm", "none", 1e-3),
        ("adam", "none", 1e-3),
    ],
)
def test_diloco_converges_on_least_squares(optimizer: str, name: str, distance: float) -> None:
    """Four workers with different targets and 10 local steps a round end at the mean of the targets."""
    targets = [randn(2, 64, seed=seed) for seed in (1, 2, 3, 4)]
    optimum = np.mean(targets, axis=0)
    anchor = np.zeros((2, 64), np.float32)
    moments, chosen, of = zeros(optimizer, anchor), codec(name), OUTER_OPTIMIZERS[optimizer]
    for round_ in range(150):
        encoded = []
        for target in targets:
            local = anchor.copy()
            for _ in range(10):
                local -= np.float32(0.05) * (local - target)
            encoded.append((chosen.encode(anchor - local), 1.0))
        mean = weighted_mean(encoded, chosen, 2)
        outer_step(optimizer, anchor, moments, mean, lr=of.lr, momentum=of.momentum, round_=round_)
    assert np.abs(anchor - optimum).max() < distance
