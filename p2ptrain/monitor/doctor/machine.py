"""Read the facts about this machine, in a few milliseconds and without the network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from p2ptrain.algorithms import kernels
from p2ptrain.settings.cores import usable_cores
from p2ptrain.settings.free_memory import free_memory_bytes
from p2ptrain.version import __version__

# Packages whose versions belong in a bug report.
PACKAGES = ("torch", "hivemind")


@dataclass(frozen=True)
class Machine:
    """Facts about a machine; None if the system does not provide them.

    Attributes:
        versions: by package name, including Python and p2ptrain; "" if not installed.
        cores: CPU cores that this process may use.
        threads: CPU threads of torch.
        native: whether the native loops of rounds were built.
        memory_bytes: memory available without swapping, within a container's limit.
        disk_bytes: free space for this user in the file system of `out`.
        writable: whether files can be created there.
        open_files: limit of open files of this process.
        gpu: name of the first GPU that torch finds.
        gpu_bytes: free memory of that GPU.
    """

    versions: dict[str, str]
    cores: int
    threads: int
    native: bool
    memory_bytes: int | None
    disk_bytes: int | None
    writable: bool
    open_files: int | None
    gpu: str | None
    gpu_bytes: int | None


def read_machine(out: Path, *, gpu: bool) -> Machine:
    """Read the facts about this machine.

    Args:
        out: a peer's output directory; it need not exist.
        gpu: whether to query the GPU, which allocates some of its memory.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    has_gpu = gpu and torch.cuda.is_available()
    return Machine(
        versions={"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        | {"p2ptrain": __version__},
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        native=kernels.library() is not None,
        memory_bytes=free_memory_bytes(),
        disk_bytes=_disk_bytes(place),
        writable=place.is_dir() and os.access(place, os.W_OK | os.X_OK),
        open_files=_open_files(),
        gpu=torch.cuda.get_device_name(0) if has_gpu else None,
        gpu_bytes=torch.cuda.mem_get_info(0)[0] if has_gpu else None,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _disk_bytes(place: Path) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft
