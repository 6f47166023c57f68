"""The device of each rank, and its precision."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.settings.torchrun import ONE_PROCESS, Launch
from p2ptrain.training import device as device_module
from p2ptrain.training.device import choose_device, choose_precision, device_of

THREE = Launch(rank=2, size=3)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with three GPUs. Returns the devices that were made the current one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(device_module, "choose_device", torch.device)
    return chosen


def test_each_rank_has_a_gpu_of_its_own(gpus: list[torch.device]) -> None:
    for name in ("auto", "cuda"):
        assert device_of(name, THREE) == torch.device("cuda:2")
    assert gpus == [torch.device("cuda:2")] * 2
    assert device_of("cpu", THREE) == torch.device("cpu")


def test_more_ranks_than_gpus_are_refused(gpus: list[torch.device]) -> None:
    with pytest.raises(ConfigError, match=r"--device auto: torchrun started 4 .* sees 3 GPUs; give --nproc-per-node 3"):
        device_of("auto", Launch(rank=0, size=4))


def test_one_device_for_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device mps: is one device, and torchrun started 3 processes"):
        device_of("mps", THREE)


def test_without_gpus_all_ranks_share_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", THREE) == device_of("auto", ONE_PROCESS) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"--device cuda: .* sees 0 GPUs; give --nproc-per-node 1, or --device cpu"):
        device_of("cuda", THREE)


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"--device gpu: not a device of torch"):
        choose_device("gpu")
    with pytest.raises(ConfigError, match=r"--device cuda:99: cannot be used"):
        choose_device("cuda:99")


def test_what_precision_a_device_gets() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) is None
    assert choose_precision("float32", cpu) is None
    assert choose_precision("bfloat16", cpu) is torch.bfloat16
