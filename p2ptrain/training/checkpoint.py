"""Checkpoints: written all or nothing, checked when read; the last three are kept.

A checkpoint is a directory `checkpoint-<step>`:

    model.safetensors    the tensors of one part of the state; also trainer.safetensors and peer.safetensors
    manifest.json        size and SHA-256 of each file, the rest of the state, and `info`

It is written under a temporary name and renamed when complete, so a crash or a full disk never damages earlier ones.
The newest checkpoint is the one saved last, which need not have the highest step: a round may set a fast peer back.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from p2ptrain.errors import CheckpointError, ConfigError
from p2ptrain.settings.peer_config import default_dir

T = TypeVar("T")

FORMAT = 4
KEEP = 3
REPLACED = "-replaced.tmp"
_NAME = re.compile(r"checkpoint-(\d+)")
MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: the run's step at which it was saved.
        info: plain values about it, such as the run's settings and versions.
        state: the parts, each a nested structure of dicts, lists, tensors and plain values.
    """

    step: int
    info: Mapping[str, Any]
    state: Mapping[str, Any]


def save(out: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `out`, remove all but the newest KEEP, and return its directory.

    An earlier one of the same step is replaced. Those of another start of the run get another name, and are kept.
    Raises CheckpointError if it could not be written.
    """
    target = out / name_of(checkpoint.step)
    building = out / f".checkpoint-{checkpoint.step}.tmp"
    try:
        for path, had_name in _between_names(out).items():
            path.rename(had_name)
        for unfinished in out.glob(".checkpoint-*.tmp"):
            shutil.rmtree(unfinished)
        building.mkdir(parents=True)
        serial = 1 + max((_serial(path) or 0 for path in checkpoints(out)), default=0)
        _write(building, checkpoint, serial)
        if genesis := checkpoint.info.get("genesis"):
            _set_apart(out, genesis)
        if target.exists():  # removed only later: that takes long, and the process may be killed meanwhile
            target.rename(out / f".{target.name}{REPLACED}")
        building.rename(target)
        _sync(out)
    except Exception as error:
        shutil.rmtree(building, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        if isinstance(error, (OSError, SafetensorError)):
            fix = "free space there, or give another --out"
        elif isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            fix = "there is no memory for it now"
        else:  # a model's state may have what its get_extra_state() returns, and tensors of unusual types
            fix = "keep only real tensors, numbers, texts, and lists or dictionaries of them in that state"
        raise CheckpointError(f"cannot write {target}: {reason}; {fix}") from error
    # Checkpoints with a damaged manifest are removed first.
    spare = sorted(checkpoints(out), key=lambda path: _serial(path) is None)[KEEP:]
    for old in [*spare, *out.glob(".checkpoint-*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(out: Path) -> list[Path]:
    """List the checkpoint directories below `out`, newest first; empty if `out` does not exist.

    One with a damaged manifest comes first, because it may be the newest.
    """
    if not out.is_dir():
        return []
    names = {path: path for path in out.iterdir()} | _between_names(out)
    steps = {path: int(match[1]) for path, name in names.items() if (match := _NAME.fullmatch(name.name))}

    def place(path: Path) -> tuple[float, int]:
        serial = _serial(path)
        return (math.inf if serial is None else serial, steps[path])

    return sorted(steps, key=place, reverse=True)


def load_newest(out: Path, parts: Collection[str] | None = None) -> Checkpoint | None:
    """Read the newest undamaged checkpoint below `out`; None if there are no checkpoints. `parts`: as for `load`.

    Damaged ones are logged. Raises CheckpointError if all are damaged.
    """
    found = checkpoints(out)
    for path in found:
        try:
            saved = load(path, parts)
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        if path != found[0]:
            logger.warning("using %s instead", path)
        return saved
    if found:
        raise CheckpointError(f"{out}: all of its checkpoints are damaged")
    return None


def _between_names(out: Path) -> dict[Path, Path]:
    """The checkpoints that were being replaced when the process was killed, each with the name that it had."""
    replaced = {path: path.with_name(path.name[1:].removesuffix(REPLACED)) for path in out.glob(f".*{REPLACED}")}
    return {path: had_name for path, had_name in replaced.items() if not had_name.exists()}


def load(path: Path, parts: Collection[str] | None = None) -> Checkpoint:
    """Read one checkpoint directory; with `parts`, only those parts of its state.

    Raises CheckpointError if it is damaged or incomplete, or has the format of another version of p2ptrain.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        content = manifest["content"]
        if _digest(content) != manifest["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} does not match its hash")
        if content["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {content['format']}, this version reads {FORMAT}")
        state = {}
        for part in content["state"] if parts is None else parts:
            file = path / f"{part}.safetensors"
            if file_sha256(file) != content["files"][file.name]["sha256"]:
                raise CheckpointError(f"checkpoint {path} is damaged: {file.name} does not match its hash")
            state[part] = _unpack(content["state"][part], load_file(file))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {type(error).__name__}: {error}") from error
    return Checkpoint(step=content["step"], info=content["info"], state=state)


def load_given(path: Path, parts: Collection[str] | None = None) -> Checkpoint:
    """Read a checkpoint given by the user, or the newest undamaged one in the --out directory of a `p2ptrain join`.

    `parts`: as for `load`. Raises ConfigError if there is no checkpoint, or all are damaged.
    """
    try:
        saved = load(path, parts) if (path / MANIFEST).exists() else load_newest(path, parts)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give another checkpoint") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if saved is None:
        fault = "no checkpoint there" if path.exists() else "no such directory"
        patterns = [f"{glob.escape(path.name)}*"]
        of_any_run = f"{default_dir('*')}"
        if path.match(of_any_run):
            patterns += [of_any_run, "*"]  # another run's, or one with --out
        for pattern in patterns:
            if siblings := sorted(filter(checkpoints, path.parent.glob(pattern))):
                raise ConfigError(f"{path}: {fault}; {siblings[0]} has a checkpoint")
        raise ConfigError(f"{path}: {fault}; `p2ptrain join` writes checkpoints every 10 minutes and on Ctrl-C")
    return saved


def _set_apart(out: Path, genesis: str) -> None:
    """Rename the checkpoints of another start of the run, so that this one neither replaces nor removes them."""
    for path in checkpoints(out):
        other = _from_manifest(path, lambda content: str(content["info"]["genesis"]))
        if not other or other == genesis:
            continue
        apart = path.with_name(f"other-start-{re.sub('[^0-9A-Za-z]', '', other)[:12]}-{path.name}")
        shutil.rmtree(apart, ignore_errors=True)
        path.rename(apart)
        logger.warning("%s is of another start of the run, and is kept as %s", path, apart.name)


def _serial(path: Path) -> int | None:
    """The serial number of a checkpoint, which grows with each save; None if its manifest is damaged."""
    return _from_manifest(path, lambda content: int(content.get("serial", 0)))


def _from_manifest(path: Path, read: Callable[[Mapping[str, Any]], T]) -> T | None:
    """What `read` takes from a manifest's content; None if it is missing there, or the manifest is damaged."""
    try:
        return read(json.loads((path / MANIFEST).read_bytes())["content"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _write(folder: Path, checkpoint: Checkpoint, serial: int) -> None:
    files, plain = {}, {}
    for part, value in checkpoint.state.items():
        tensors: dict[str, torch.Tensor] = {}
        plain[part] = _pack(value, part, _collector(tensors))
        file = folder / f"{part}.safetensors"
        save_file(tensors, file)
        _sync(file)
        files[file.name] = {"sha256": file_sha256(file), "size_bytes": file.stat().st_size}
    content = {"format": FORMAT, "serial": serial, "step": checkpoint.step, "info": dict(checkpoint.info)}
    content |= {"files": files, "state": plain}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"sha256": _digest(content), "content": content}, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def _collector(tensors: dict[str, torch.Tensor]) -> Callable[[str, torch.Tensor], str]:
    """Return a function that stores a tensor in `tensors` and returns its name there; aliases share one name."""
    names: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()

    def collect(name: str, tensor: torch.Tensor) -> str:
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device))
        if tensor.numel() and identity in names:
            return names[identity]
        names[identity] = name
        # Copy only tensors that safetensors would refuse: parts of a larger storage, and further views of one.
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        storages.add(storage.data_ptr())
        tensors[name] = tensor.detach() if whole else tensor.detach().clone(memory_format=torch.contiguous_format)
        return name

    return collect


def _pack(value: Any, name: str, collect: Callable[[str, torch.Tensor], str]) -> Any:
    """Convert nested state to JSON values. Tensors become references; a key with a dollar tags other types."""
    match value:
        case torch.Tensor():
            return {"$tensor": collect(name, value)}
        case np.ndarray():
            return {"$array": collect(name, torch.from_numpy(value))}
        case bytes():
            return {"$bytes": value.hex()}
        case tuple():
            return {"$tuple": [_pack(item, f"{name}.{index}", collect) for index, item in enumerate(value)]}
        case list():
            return [_pack(item, f"{name}.{index}", collect) for index, item in enumerate(value)]
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{name}.{key}", collect) for key, item in value.items()}
        case Mapping() if all(isinstance(key, (type(None), bool, int, float, str)) for key in value):
            return {"$items": [[key, _pack(item, f"{name}.{key}", collect)] for key, item in value.items()]}
        case None | bool() | int() | float() | str():
            return value
    with_keys = " with such keys" if isinstance(value, Mapping) else ""
    raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}{with_keys}")


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$array": name}:
            return tensors[name].numpy()
        case {"$bytes": text}:
            return bytes.fromhex(text)
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"$items": items}:
            return {key: _unpack(item, tensors) for key, item in items}
        case dict():
            return {key: _unpack(item, tensors) for key, item in value.items()}
        case list():
            return [_unpack(item, tensors) for item in value]
    return value


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or directory to disk, so that a renamed checkpoint is never incomplete after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
