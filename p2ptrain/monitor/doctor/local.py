"""Whether a peer would work on this machine: judgements of what `machine` read. Nothing here looks at anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.monitor.doctor.finding import Finding, Mark
from p2ptrain.monitor.doctor.machine import Machine
from p2ptrain.monitor.formatting import count, size

# The oldest that setup.cfg takes; hivemind's daemon and its messages change between versions.
LEAST = {"Python": "3.11", "torch": "2.4", "hivemind": "1.1.12"}
# In units of the parameters in fp32. At rest: weights, gradients and AdamW's two moments. Beside them a peer takes
# 4.30 x at most in a round (docs/BENCHMARKS.md, 124M, in host memory also where it trains on a GPU).
AT_REST, IN_A_ROUND = 4.0, 4.3
# A peer of the demo model, nearly all of it libraries (measured: 421 MB).
LIBRARIES_BYTES = 420_000_000
# Beyond this share of what is free, a batch of long windows may be too much (guess).
TIGHT = 0.8
# Weights, AdamW's two moments, anchor and outer momentum; three are kept while the next is written.
CHECKPOINT, CHECKPOINTS_AT_ONCE = 5, 4
# Streams, sockets of p2pd, files and metrics of a peer with 64 partners take some two hundred.
ENOUGH_FILES, LEAST_FILES = 1024, 128


def check_machine(
    machine: Machine, *, out: Path, model: str, num_parameters: int | None, device: str
) -> Iterator[Finding]:
    """All that can be said without the network.

    Args:
        machine: what it has.
        out: the peer's directory.
        model: what it is to train, for messages.
        num_parameters: of that model; None where it is not known.
        device: as given by `--device`.
    """
    on_gpu = machine.gpu is not None
    yield check_versions(machine)
    yield check_threads(machine)
    yield check_gpu(machine, device)
    if num_parameters is not None:
        yield check_memory(machine, model, num_parameters, on_gpu=on_gpu)
        if on_gpu:
            yield check_gpu_memory(machine, model, num_parameters)
    yield check_disk(machine, out, model, num_parameters)
    yield check_open_files(machine)


def check_versions(machine: Machine) -> Finding:
    missing = [name for name, version in machine.versions.items() if not version]
    old = [name for name, least in LEAST.items() if _is_older(machine.versions.get(name, ""), least)]
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.versions.items())
    if "Python" in old:
        return Finding("versions", Mark.FAILED, text, f"install Python {LEAST['Python']} or newer")
    if missing or old:
        wanted = " ".join(f"'{name}>={LEAST[name]}'" for name in dict.fromkeys([*missing, *old]))
        return Finding("versions", Mark.FAILED, text, f"pip install {wanted}")
    return Finding("versions", Mark.OK, text)


def check_threads(machine: Machine) -> Finding:
    text = f"{count(machine.cores, 'core')}, {count(machine.threads, 'thread')} of torch"
    if machine.threads > machine.cores:
        return Finding(
            "processor", Mark.WARNING, f"{text}: they are in each other's way", f"add --threads {machine.cores}"
        )
    return Finding("processor", Mark.OK, text)


def check_gpu(machine: Machine, device: str) -> Finding:
    if device == "cpu":
        return Finding("GPU", Mark.OK, "none wanted: --device cpu")
    if machine.gpu is not None:
        return Finding("GPU", Mark.OK, f"{machine.gpu}, {_size(machine.gpu_bytes)} free")
    if device.startswith("cuda"):
        return Finding(
            "GPU", Mark.FAILED, f"torch sees none, and --device is {device}",
            "nvidia-smi shows whether the driver does; or give --device cpu",
        )  # fmt: skip
    return Finding("GPU", Mark.OK, "torch sees none: training on the CPU" if device == "auto" else f"--device {device}")


def check_memory(machine: Machine, model: str, num_parameters: int, *, on_gpu: bool) -> Finding:
    """Host memory, against what a peer takes in a round; what a batch takes comes on top and is not known here."""
    factor = IN_A_ROUND + (0.0 if on_gpu else AT_REST)
    needed = round(4 * factor * num_parameters) + LIBRARIES_BYTES
    text = f"{model} takes {_size(needed)} in a round, and its batch on top"
    if machine.memory_bytes is None:
        return Finding("memory", Mark.OK, f"{text}; how much is free this system does not tell")
    text = f"{_size(machine.memory_bytes)} free; {text}"
    if needed > machine.memory_bytes:
        return Finding("memory", Mark.FAILED, text, "close other programs, or train a smaller model (--model)")
    if needed > TIGHT * machine.memory_bytes:
        return Finding("memory", Mark.WARNING, text, "start with a small batch: --batch-size 1")
    return Finding("memory", Mark.OK, text)


def check_gpu_memory(machine: Machine, model: str, num_parameters: int) -> Finding:
    needed = round(4 * AT_REST * num_parameters)
    text = f"{_size(machine.gpu_bytes)} free; {model} takes {_size(needed)}, and its batch on top"
    if machine.gpu_bytes is not None and needed > machine.gpu_bytes:
        return Finding("GPU memory", Mark.FAILED, text, "end what nvidia-smi shows on it, or give --device cpu")
    return Finding("GPU memory", Mark.OK, text)


def check_disk(machine: Machine, out: Path, model: str, num_parameters: int | None) -> Finding:
    if not machine.writable:
        return Finding(
            "disk", Mark.FAILED, f"{out} cannot be written", "give another --out, or: chmod u+rwx its directory"
        )
    free = f"{_size(machine.disk_bytes)} free for {out}"
    if num_parameters is None or machine.disk_bytes is None:
        return Finding("disk", Mark.OK, free)
    one = 4 * CHECKPOINT * num_parameters
    text = f"{free}; checkpoints of {model} take {_size(CHECKPOINTS_AT_ONCE * one)}"
    if machine.disk_bytes < CHECKPOINTS_AT_ONCE * one:
        # Training goes on without them (docs/reliability.md).
        return Finding("disk", Mark.WARNING, text, "give an --out on a larger disk, or make room")
    return Finding("disk", Mark.OK, text)


def check_open_files(machine: Machine) -> Finding:
    if machine.open_files is None:
        return Finding("open files", Mark.OK, "no limit")
    text = f"{machine.open_files:,} allowed"
    if machine.open_files >= ENOUGH_FILES:
        return Finding("open files", Mark.OK, text)
    mark = Mark.FAILED if machine.open_files < LEAST_FILES else Mark.WARNING
    return Finding("open files", mark, f"{text}: little for many peers", "ulimit -n 4096")


def _is_older(version: str, least: str) -> bool:
    # Enough of PEP 440: a nightly build of torch counts as the version that it becomes.
    return [int(part) for part in re.findall(r"\d+", version)[:3]] < [int(part) for part in least.split(".")]


def _size(size_bytes: float | None) -> str:
    return "an unknown amount" if size_bytes is None else size(size_bytes)
