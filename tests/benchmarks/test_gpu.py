"""The benchmark of training on a GPU: what it says without one, and on a small scale on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import bench_gpu
from p2ptrain.settings.config import RunConfig


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA or ROCm GPU"):
        bench_gpu.run()


def test_it_measures_gpt_2_in_its_published_size() -> None:
    with torch.device("meta"):
        model = bench_gpu._model(dataclasses.replace(bench_gpu.GPT2, device="meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.long
@pytest.mark.processes
def test_on_a_cpu_it_measures_fragments_and_rounds() -> None:
    small = dataclasses.replace(
        bench_gpu.GPT2, device="cpu", model="gpt-demo", vocab_size=RunConfig.vocab_size, windows=2, steps=30,
        sync_every=15, precision=None, compiled=False,
    )  # fmt: skip
    step, training = bench_gpu.measure(small)
    assert step.values["merged"] > 0
    assert step.values["landed"] > 0
    assert 0 < step.values["median_s"] <= step.values["p99_s"]
    assert training.values["share"] > 0
    assert bench_gpu.measure_round(small, rounds=1).values["wall_s"] > 0
