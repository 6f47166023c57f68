"""What does not fit into memory is refused, and a CPU computes few windows at once."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.training.memory import check_parameters, check_text, check_tokens, check_window, windows_at_once
from p2ptrain.training.models import Llama, LlamaConfig, build

GB = 10**9


def test_windows_at_once_follow_the_models_matrices() -> None:
    shapes = [torch.Size(shape) for shape in ((100, 10), (10,), (30, 10), (2, 3, 5, 5))]
    # 160 values of a token, of 12 bytes each, in a window of 64; a bias has no matrix.
    assert windows_at_once(shapes, 64, None) == 2**30 // (12 * 160 * 64)
    assert windows_at_once(shapes, 64, 10 * GB) == 2**30 // (12 * 160 * 64)
    assert windows_at_once(shapes, 64, 8_000_000) == 2_000_000 // (12 * 160 * 64)
    assert windows_at_once(shapes, 64, 0) == windows_at_once(shapes, 10**6, 0) == 1
    assert windows_at_once([], 64, None) == 2**30


def test_gpt_2_computes_a_window_at_once_and_the_demos_model_a_whole_step() -> None:
    block = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    gpt2 = [torch.Size(shape) for shape in ((50257, 768), (1024, 768), *12 * block)]
    assert windows_at_once(gpt2, 1024, None) == 1
    demo = build("gpt-demo", vocab_size=98, seed=0)
    assert windows_at_once([p.shape for p in demo.parameters()], 64, None) > 256


def test_the_estimate_is_at_least_what_the_backward_pass_keeps() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=500, layers=3, heads=4, width=64, hidden=128, context=32))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(500, (8, 32))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() > 0
    free_bytes = 4 * sum(kept.values())
    assert 2 <= windows_at_once([p.shape for p in model.parameters()], 32, free_bytes) <= 8


def test_a_window_that_cannot_be_computed_is_refused() -> None:
    """The longest that a run's settings may say, with the smallest model."""
    shapes = [torch.Size(shape) for shape in ((98, 64), (2**20, 64), *2 * ((192, 64), (64, 64), (256, 64), (64, 256)))]
    check_window(shapes, 64, GB)
    check_window(shapes, 2**20, None)
    with pytest.raises(
        ConfigError, match=r"--context 1048576: training on one window takes 7\.\d GB or more, and 4.0 GB"
    ):
        check_window(shapes, 2**20, 4 * GB)


@pytest.mark.parametrize(
    ("check", "fits", "too_many", "message"),
    [
        (check_tokens, 10**8, 10**9, "X 1000000000: their ids alone take 40 GB, and 8.0 GB of memory are free"),
        (check_text, GB, 10 * GB, "--data X: 10 GB of text take 40 GB while it is read, and 8.0 GB of memory are free"),
        (check_parameters, 2 * GB, 3 * GB, "--model X: its weights take at least 12 GB (3,000,000,000 parameters)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_both_numbers(check, fits: int, too_many: int, message: str) -> None:
    check("X", fits, 8 * GB)
    check("X", too_many, None)
    with pytest.raises(ConfigError) as caught:
        check("X", too_many, 8 * GB)
    assert str(caught.value).startswith(message)
