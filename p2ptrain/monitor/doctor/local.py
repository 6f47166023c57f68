"""Facts about this machine, read in a few milliseconds without the network, and checks as pure functions of them."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from p2ptrain import __version__
from p2ptrain.algorithms import kernels
from p2ptrain.formatting import count, size
from p2ptrain.monitor.doctor.finding import Finding, Mark, ok, warning
from p2ptrain.monitor.estimate import at_rest_bytes, in_a_round_bytes
from p2ptrain.settings.files import try_to_write
from p2ptrain.settings.machine import free_memory_bytes, usable_cores

logger = logging.getLogger(__name__)

# Packages whose versions belong in a bug report.
PACKAGES = ("torch", "hivemind")
# The minimum versions of setup.cfg; hivemind's daemon and messages change between versions.
LEAST = {"Python": "3.11", "torch": "2.4", "hivemind": "1.1.12"}
# Above this share of the free memory, a batch of long windows may not fit (guess).
TIGHT = 0.8
# Size of a checkpoint in units of the parameters: weights, AdamW's two moments, anchor and outer momentum. Three
# checkpoints are kept while the next one is written.
CHECKPOINT, CHECKPOINTS_AT_ONCE = 5, 4
# A peer with 64 partners opens about 200 files (streams, sockets of p2pd, metrics).
ENOUGH_FILES, LEAST_FILES = 1024, 128


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


def read_machine(out: Path, *, device: str) -> Machine:
    """Read the facts about this machine.

    Args:
        out: a peer's output directory; it need not exist.
        device: where the model is trained, "auto" for a GPU if there is one. A GPU is queried, which allocates some of
            its memory.
    """
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    gpu = _index_of(device)
    return Machine(
        versions={"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        | {"p2ptrain": __version__},
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        native=kernels.library() is not None,
        memory_bytes=free_memory_bytes(),
        disk_bytes=_disk_bytes(place),
        writable=_is_writable(place),
        open_files=_open_files(),
        gpu=None if gpu is None else torch.cuda.get_device_name(gpu),
        gpu_bytes=None if gpu is None else torch.cuda.mem_get_info(gpu)[0],
    )


def _index_of(device: str) -> int | None:
    """The index of a device's GPU; None if the device is no GPU, or this machine does not have it."""
    try:
        chosen = torch.device("cuda" if device == "auto" else device)
    except RuntimeError:  # no device of torch: `join` refuses it
        return None
    index = chosen.index or 0
    return index if chosen.type == "cuda" and index < torch.cuda.device_count() else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_writable(place: Path) -> bool:
    try:
        try_to_write(place)
    except OSError:
        return False
    return True


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


def check_machine(
    machine: Machine, *, out: Path, model: str, num_parameters: int | None, device: str, vectors: int = 0
) -> Iterator[Finding]:
    """Run all checks that do not need the network.

    Args:
        machine: facts about the machine.
        out: the peer's output directory.
        model: name of the model, for messages.
        num_parameters: of that model; None if unknown.
        device: as given by `--device`.
        vectors: further vectors of the model's size that the run's settings need (`vectors_more`).
    """
    on_gpu = machine.gpu is not None
    yield check_versions(machine)
    yield check_threads(machine)
    yield check_gpu(machine, device)
    if num_parameters is not None:
        yield check_memory(machine, model, num_parameters, on_gpu=on_gpu, vectors=vectors)
        if on_gpu:
            yield check_gpu_memory(machine, model, num_parameters)
    yield check_disk(machine, out, model, num_parameters)
    yield check_open_files(machine)


def quick_look(out: Path, model: str, device: str, *, num_parameters: int | None, vectors: int = 0) -> list[Finding]:
    """The problems of this machine, as warnings when a peer starts; arguments as above. Never raises."""
    try:
        machine = read_machine(out, device=device)
        found = list(
            check_machine(machine, out=out, model=model, num_parameters=num_parameters, device=device, vectors=vectors)
        )
    except Exception as error:  # a failing check must not keep a peer from training
        logger.debug("the quick check of this machine failed: %r", error)
        return []
    return [finding for finding in found if finding.mark is not Mark.OK]


def check_versions(machine: Machine) -> Finding:
    missing = [name for name, version in machine.versions.items() if not version]
    old = [name for name, least in LEAST.items() if _is_older(machine.versions.get(name, ""), least)]
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.versions.items())
    if not missing and not old:
        return ok("versions", text)
    wanted = " ".join(f"'{name}>={LEAST[name]}'" for name in dict.fromkeys([*missing, *old]))
    remedy = f"install Python {LEAST['Python']} or newer" if "Python" in old else f"pip install {wanted}"
    return Finding("versions", Mark.FAILED, text, remedy)


def check_threads(machine: Machine) -> Finding:
    text = f"{count(machine.cores, 'core')}, {count(machine.threads, 'torch thread')}"
    if not machine.native:
        text += "; rounds take longer without native loops: install a C compiler, then p2ptrain again"
    if machine.threads > machine.cores:
        text += ": too many threads slow training down"
        return warning("processor", text, f"add --threads {machine.cores}")
    return ok("processor", text)


def check_gpu(machine: Machine, device: str) -> Finding:
    if device == "cpu":
        return ok("GPU", "not used: --device cpu")
    if machine.gpu is not None:
        return ok("GPU", f"{machine.gpu}, {_size(machine.gpu_bytes)} free")
    if device.startswith("cuda"):
        text = f"torch finds none, but --device is {device}"
        return Finding("GPU", Mark.FAILED, text, "check the driver with nvidia-smi, or give --device cpu")
    return ok("GPU", "torch finds none: using the CPU" if device == "auto" else f"--device {device}")


def check_memory(machine: Machine, model: str, num_parameters: int, *, on_gpu: bool, vectors: int = 0) -> Finding:
    """Compare host memory with what a peer needs in a round, without its batch, whose memory is unknown here."""
    needed = in_a_round_bytes(num_parameters, vectors) + (0 if on_gpu else at_rest_bytes(num_parameters))
    text = f"{model} needs {_size(needed)} in a round, plus its batch"
    if machine.memory_bytes is None:
        return ok("memory", f"{text}; the free memory of this system is unknown")
    text = f"{_size(machine.memory_bytes)} free; {text}"
    if needed > machine.memory_bytes:
        return Finding("memory", Mark.FAILED, text, "close other programs, or train a smaller model (--model)")
    if needed > TIGHT * machine.memory_bytes:
        return warning("memory", text, "start with few windows at once: --micro-batch 1")
    return ok("memory", text)


def check_gpu_memory(machine: Machine, model: str, num_parameters: int) -> Finding:
    needed = at_rest_bytes(num_parameters)
    text = f"{_size(machine.gpu_bytes)} free; {model} needs {_size(needed)}, plus its batch"
    if machine.gpu_bytes is not None and needed > machine.gpu_bytes:
        return Finding("GPU memory", Mark.FAILED, text, "stop other processes on it (nvidia-smi), or give --device cpu")
    return ok("GPU memory", text)


def check_disk(machine: Machine, out: Path, model: str, num_parameters: int | None) -> Finding:
    if not machine.writable:
        remedy = "give another --out, or chmod u+rwx its directory"
        return Finding("disk", Mark.FAILED, f"{out} is not writable", remedy)
    free = f"{_size(machine.disk_bytes)} free for {out}"
    if num_parameters is None or machine.disk_bytes is None:
        return ok("disk", free)
    needed = CHECKPOINTS_AT_ONCE * 4 * CHECKPOINT * num_parameters
    text = f"{free}; checkpoints of {model} need {size(needed)}"
    if machine.disk_bytes < needed:
        # Training continues without checkpoints (docs/understand/reliability.md).
        return warning("disk", text, "give an --out on a larger disk, or free some space")
    return ok("disk", text)


def check_open_files(machine: Machine) -> Finding:
    if machine.open_files is None or machine.open_files >= ENOUGH_FILES:
        return ok("open files", "no limit" if machine.open_files is None else f"{machine.open_files:,} allowed")
    mark = Mark.FAILED if machine.open_files < LEAST_FILES else Mark.WARNING
    return Finding("open files", mark, f"{machine.open_files:,} allowed: too few for many peers", "ulimit -n 4096")


def _is_older(version: str, least: str) -> bool:
    # A subset of PEP 440: a nightly build of torch compares equal to its release.
    return [int(part) for part in re.findall(r"\d+", version)[:3]] < [int(part) for part in least.split(".")]


def _size(size_bytes: float | None) -> str:
    return "an unknown amount" if size_bytes is None else size(size_bytes)
