"""A run's first weights from a file: a checkpoint of ours, or a state dict in the safetensors format.

DiLoCo starts from a model pretrained for 24,000 steps, and finds 0 to 48,000 to end within 0.1 perplexity of each
other (section 3.1, figure 3). Only the founder of a run needs the file: everybody else downloads the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.training import checkpoint


def check_weights(path: Path) -> None:
    """See cheaply whether there are weights at `path`, without reading them. Raises ConfigError when not."""
    if path.is_dir():
        if not (path / checkpoint.MANIFEST).exists() and not checkpoint.checkpoints(path):
            raise ConfigError(
                f"--init-from {path}: no checkpoint in this directory; give one, the --out directory of a p2ptrain "
                f"join that wrote one, or a .safetensors file"
            )
        return
    try:
        with path.open("rb"), safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The state dict at `path`, on the CPU.

    Args:
        path: a checkpoint directory, a directory with checkpoints (the newest is taken), or a .safetensors file.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    check_weights(path)
    if path.is_dir():
        weights: dict[str, torch.Tensor] = checkpoint.load_given(path, parts=["model"]).state["model"]
        return weights
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], *, origin: str) -> None:
    """Overwrite the model's parameters and persistent buffers, converting types. All or nothing.

    Args:
        model: the model as every peer of the run builds it.
        weights: by name, as in `model.state_dict()`. Of tensors that are tied, one name is enough.
        origin: where they are from, for messages.

    Raises:
        ConfigError: a name is missing or unknown, a shape differs, a value is not finite, or a frozen parameter has
            another value than that which the other peers build.
    """
    ours = model.state_dict()
    given = {_place(ours[name]) for name in weights if name in ours}
    missing = [name for name, tensor in ours.items() if name not in weights and _place(tensor) not in given]
    _refuse(missing, len(ours), origin, "is missing", "of the model's tensors are")
    unknown = [name for name in weights if name not in ours]
    _refuse(unknown, len(weights), origin, "is not in the model", "of the file's tensors are not")
    both = {name: (ours[name], weights[name]) for name in weights}
    shapes = [
        f"{name} has shape {tuple(new.shape)}, in the model {tuple(old.shape)}"
        for name, (old, new) in both.items()
        if old.shape != new.shape
    ]
    _refuse(shapes, len(weights), origin, "", "of the file's tensors differ")
    wild = [name for name, (_, new) in both.items() if new.is_floating_point() and not torch.isfinite(new).all()]
    _refuse(wild, len(weights), origin, "has values that are not finite", "of the file's tensors have")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, (old, new) in both.items():
        if name in frozen and not torch.equal(old, new.to(old)):
            raise ConfigError(
                f"--init-from {origin}: {name} is frozen, and has other values than the model is built with, which "
                f"would shut every joiner out; let the model's factory load it, or train it"
            )
    with torch.no_grad():
        for old, new in both.values():
            old.copy_(new)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor. One without storage, on the meta device or empty, is only itself."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _refuse(names: Collection[str], total: int, origin: str, first: str, rest: str) -> None:
    if names:
        raise ConfigError(
            f"--init-from {origin}: {' '.join([next(iter(names)), first]).rstrip()} ({len(names)} of {total} {rest}); "
            f"give weights of this very model, or the --model that they are of"
        )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.strerror:
        return ConfigError(
            f"--init-from {path}: cannot be read ({error.strerror}); give a checkpoint directory or .safetensors file"
        )
    return ConfigError(
        f"--init-from {path}: is no whole file in the safetensors format ({error}); "
        f"write one with safetensors.torch.save_file(model.state_dict(), …)"
    )
