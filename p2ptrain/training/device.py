"""Which device each rank of a peer trains on."""

from __future__ import annotations

import torch

from p2ptrain.errors import ConfigError
from p2ptrain.settings.torchrun import Launch
from p2ptrain.training.trainer import choose_device


def device_of(name: str, launch: Launch) -> torch.device:
    """The device of a rank: of several ranks each has a GPU of its own, or all train on the CPU. Raises ConfigError."""
    if launch.size == 1:
        return choose_device(name)
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--device {name}: is one device, and torchrun started {launch.size} processes; give cpu or cuda, or start "
            f"one process"
        )
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if (gpus := torch.cuda.device_count()) < launch.size:
        raise ConfigError(
            f"--device {name}: torchrun started {launch.size} processes, and torch sees {gpus} GPUs; give "
            f"--nproc-per-node {max(gpus, 1)}, or --device cpu"
        )
    device = choose_device(f"cuda:{launch.rank}")
    torch.cuda.set_device(device)
    return device
