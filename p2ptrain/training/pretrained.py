"""Initial weights of a run from a file: a p2ptrain checkpoint, or a state dict in the safetensors format.

DiLoCo starts from a model pretrained for 24,000 steps, and finds that 0 to 48,000 steps end within 0.1 perplexity of
each other (section 3.1, figure 3). Only the peer that starts the run needs the file; the others download the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.peer.model_tensors import WRAPPED, plain_names
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.files import open_file
from p2ptrain.training import checkpoint
from p2ptrain.training.data.tokenizer import IDS


def check_weights(path: Path) -> None:
    """Check that there are weights at `path`, without reading them. Raises ConfigError if not."""
    try:
        if path.is_dir():
            if not (path / checkpoint.MANIFEST).exists() and not checkpoint.checkpoints(path):
                raise ConfigError(
                    f"--init-from {path}: no checkpoint in this directory; give one, the --out directory of a p2ptrain "
                    f"join that wrote one, or a .safetensors file"
                )
            return
        with open_file(path), safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def read_weights(path: Path, tokenizer: str) -> dict[str, torch.Tensor]:
    """Read the state dict of a checkpoint, of the newest checkpoint in a directory, or of a .safetensors file.

    It is on the CPU. Raises ConfigError if there is none, it is damaged, or it was trained with another tokenizer than
    the one with this identity. An unknown tokenizer is accepted: it may be the same.
    """
    check_weights(path)
    if path.is_dir():
        saved = checkpoint.load_given(path, parts=["model"])
        theirs = saved.info.get("run", {}).get("tokenizer", IDS)
        if IDS not in (theirs, tokenizer) and theirs != tokenizer:
            raise ConfigError(
                f"--init-from {path}: its weights were trained with another tokenizer than this run's; give "
                f"--tokenizer with the tokenizer.json of those weights"
            )
        weights: dict[str, torch.Tensor] = saved.state["model"]
        return weights
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], *, origin: str) -> None:
    """Overwrite the model's parameters and persistent buffers, converting types. On an error, nothing is changed.

    Args:
        model: the model as every peer of the run builds it.
        weights: tensors by their names in `model.state_dict()`. Names may have the prefixes of torch's wrappers, such
            as `torch.compile`. For tied tensors one name is enough.
        origin: where the weights come from, for messages.

    Raises:
        ConfigError: a name is missing or unknown, a shape differs, a value is not finite, or the value of a frozen
            parameter is not the one that the model is built with.
    """
    ours = model.state_dict()
    plain = dict(zip(ours, (name for name, _ in plain_names(model, ours.items())), strict=True))
    weights = _by_our_names(weights, plain)
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
    frozen = {name for name, p in plain_names(model, model.named_parameters()) if not p.requires_grad}
    for name, (old, new) in both.items():
        if plain[name] in frozen and not torch.equal(old, new.to(old)):
            raise ConfigError(
                f"--init-from {origin}: {name} is frozen and has other values than the model is built with, so no "
                f"other peer could join; load it in the model's factory, or make it trainable"
            )
    with torch.no_grad():
        for old, new in both.values():
            old.copy_(new)


def load_saved(model: nn.Module, weights: Mapping[str, torch.Tensor], run: RunConfig, fix: str) -> None:
    """Load the weights of the run's checkpoint. Raises ConfigError, which ends with `fix`, if they do not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise ConfigError(
            f"the checkpoint does not fit model {run.model} with {run.vocab_size:,} ids ({reason}); the model's code "
            f"has changed, or another version of p2ptrain wrote it: {fix}"
        ) from error


def _by_our_names(weights: Mapping[str, torch.Tensor], plain: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Rename a file's tensors as the model names them. Those that the model lacks, or has already, keep their names.

    Args:
        plain: each name in the model, and the same name without torch's wrappers.
    """
    ours = {name: own for own, name in plain.items()}
    named = {name: new for name, new in weights.items() if name in plain}
    for name, new in weights.items():
        bare = ".".join(part for part in name.split(".") if part not in WRAPPED)
        # DataParallel and DistributedDataParallel add `module.` to all names.
        found = ours.get(bare) or ours.get(bare.removeprefix("module.")) or name
        named.setdefault(found if found not in named else name, new)
    return named


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for two names of one tensor. A tensor without storage (meta, empty) equals only itself."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride())


def _refuse(names: Collection[str], total: int, origin: str, first: str, rest: str) -> None:
    if names:
        raise ConfigError(
            f"--init-from {origin}: {' '.join([next(iter(names)), first]).rstrip()} ({len(names)} of {total} {rest}); "
            f"give weights of this model, or the --model that these weights belong to"
        )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.strerror:
        fix = "give a checkpoint directory or .safetensors file"
        return ConfigError(f"--init-from {path}: cannot be read ({error.strerror}); {fix}")
    return ConfigError(
        f"--init-from {path}: is not a complete safetensors file ({error}); "
        f"write one with safetensors.torch.save_file(model.state_dict(), …)"
    )
