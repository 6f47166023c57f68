"""Chooses the device that each rank of a peer trains on, and the precision."""

from __future__ import annotations

import torch

from p2ptrain.errors import ConfigError
from p2ptrain.settings.torchrun import Launch


def device_of(name: str, launch: Launch) -> torch.device:
    """The device of a rank. Several ranks have a GPU each, or all train on the CPU. Raises ConfigError."""
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


def choose_device(name: str) -> torch.device:
    """Return the torch device called `name`; "auto" is the first CUDA GPU, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: not a device of torch; give cpu, cuda, cuda:1, mps …") from error
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: cannot be used ({reason}); give cpu, or leave it out") from error
    return device


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for `--dtype`; None for none. Raises ConfigError if the device cannot have it.

    "auto" is bfloat16 on GPUs that support it, and none elsewhere: most CPUs emulate it slowly.
    """
    supported = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and supported else None
    if name == "bfloat16" and not supported:
        raise ConfigError(f"--dtype {name}: this GPU does not support it; give float32, or leave it out")
    return torch.bfloat16 if name == "bfloat16" else None
