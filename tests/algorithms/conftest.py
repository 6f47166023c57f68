"""Every test of bits runs twice: with the native loops, and with the numpy code that is their reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from p2ptrain.algorithms import kernels

# Test machines have few cores, and several tests start processes.
torch.set_num_threads(1)

BOTH_WAYS = {
    "test_averaging", "test_codec", "test_golden", "test_indexspace", "test_mixing", "test_outer", "test_pairwise",
    "test_robust", "test_sparta",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.parametrize("arithmetic", ["native", "numpy"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        match getattr(request, "param", None):
            case "native" if kernels.library() is None:
                pytest.skip("the native library was not built: no compiler was found at installation")
            case "numpy":
                patch.setattr(kernels, "library", lambda: None)
        yield getattr(request, "param", "")
