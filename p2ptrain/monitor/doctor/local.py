"""Checks of this machine, as pure functions of the facts that `machine` reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.monitor.doctor.finding import Finding, Mark
from p2ptrain.monitor.doctor.machine import Machine, read_machine
from p2ptrain.monitor.estimate import at_rest_bytes, in_a_round_bytes
from p2ptrain.monitor.formatting import count, size

logger = logging.getLogger(__name__)

# The minimum versions of setup.cfg; hivemind's daemon and messages change between versions.
LEAST = {"Python": "3.11", "torch": "2.4", "hivemind": "1.1.12"}
# Above this share of the free memory, a batch of long windows may not fit (guess).
TIGHT = 0.8
# Size of a checkpoint in units of the parameters: weights, AdamW's two moments, anchor and outer momentum. Three
# checkpoints are kept while the next one is written.
CHECKPOINT, CHECKPOINTS_AT_ONCE = 5, 4
# A peer with 64 partners opens about 200 files (streams, sockets of p2pd, metrics).
ENOUGH_FILES, LEAST_FILES = 1024, 128


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
        vectors: how many more of the model's size the run's settings need (`vectors_more`).
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
        machine = read_machine(out, gpu=device != "cpu")
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
    if "Python" in old:
        return Finding("versions", Mark.FAILED, text, f"install Python {LEAST['Python']} or newer")
    if missing or old:
        wanted = " ".join(f"'{name}>={LEAST[name]}'" for name in dict.fromkeys([*missing, *old]))
        return Finding("versions", Mark.FAILED, text, f"pip install {wanted}")
    return Finding("versions", Mark.OK, text)


def check_threads(machine: Machine) -> Finding:
    text = f"{count(machine.cores, 'core')}, {count(machine.threads, 'torch thread')}"
    if not machine.native:
        text += "; rounds take longer without native loops: install a C compiler, then p2ptrain again"
    if machine.threads > machine.cores:
        return Finding(
            "processor", Mark.WARNING, f"{text}: too many threads slow training down", f"add --threads {machine.cores}"
        )
    return Finding("processor", Mark.OK, text)


def check_gpu(machine: Machine, device: str) -> Finding:
    if device == "cpu":
        return Finding("GPU", Mark.OK, "not used: --device cpu")
    if machine.gpu is not None:
        return Finding("GPU", Mark.OK, f"{machine.gpu}, {_size(machine.gpu_bytes)} free")
    if device.startswith("cuda"):
        return Finding(
            "GPU",
            Mark.FAILED,
            f"torch finds none, but --device is {device}",
            "check the driver with nvidia-smi, or give --device cpu",
        )
    return Finding("GPU", Mark.OK, "torch finds none: using the CPU" if device == "auto" else f"--device {device}")


def check_memory(machine: Machine, model: str, num_parameters: int, *, on_gpu: bool, vectors: int = 0) -> Finding:
    """Compare host memory with what a peer needs in a round; the memory of a batch is not known here."""
    needed = in_a_round_bytes(num_parameters, vectors) + (0 if on_gpu else at_rest_bytes(num_parameters))
    text = f"{model} needs {_size(needed)} in a round, plus its batch"
    if machine.memory_bytes is None:
        return Finding("memory", Mark.OK, f"{text}; the free memory of this system is unknown")
    text = f"{_size(machine.memory_bytes)} free; {text}"
    if needed > machine.memory_bytes:
        return Finding("memory", Mark.FAILED, text, "close other programs, or train a smaller model (--model)")
    if needed > TIGHT * machine.memory_bytes:
        return Finding("memory", Mark.WARNING, text, "start with few windows at once: --micro-batch 1")
    return Finding("memory", Mark.OK, text)


def check_gpu_memory(machine: Machine, model: str, num_parameters: int) -> Finding:
    needed = at_rest_bytes(num_parameters)
    text = f"{_size(machine.gpu_bytes)} free; {model} needs {_size(needed)}, plus its batch"
    if machine.gpu_bytes is not None and needed > machine.gpu_bytes:
        return Finding("GPU memory", Mark.FAILED, text, "stop other processes on it (nvidia-smi), or give --device cpu")
    return Finding("GPU memory", Mark.OK, text)


def check_disk(machine: Machine, out: Path, model: str, num_parameters: int | None) -> Finding:
    if not machine.writable:
        return Finding(
            "disk", Mark.FAILED, f"{out} is not writable", "give another --out, or chmod u+rwx its directory"
        )
    free = f"{_size(machine.disk_bytes)} free for {out}"
    if num_parameters is None or machine.disk_bytes is None:
        return Finding("disk", Mark.OK, free)
    one = 4 * CHECKPOINT * num_parameters
    text = f"{free}; checkpoints of {model} need {_size(CHECKPOINTS_AT_ONCE * one)}"
    if machine.disk_bytes < CHECKPOINTS_AT_ONCE * one:
        # Training continues without checkpoints (docs/understand/reliability.md).
        return Finding("disk", Mark.WARNING, text, "give an --out on a larger disk, or free some space")
    return Finding("disk", Mark.OK, text)


def check_open_files(machine: Machine) -> Finding:
    if machine.open_files is None:
        return Finding("open files", Mark.OK, "no limit")
    text = f"{machine.open_files:,} allowed"
    if machine.open_files >= ENOUGH_FILES:
        return Finding("open files", Mark.OK, text)
    mark = Mark.FAILED if machine.open_files < LEAST_FILES else Mark.WARNING
    return Finding("open files", mark, f"{text}: too few for many peers", "ulimit -n 4096")


def _is_older(version: str, least: str) -> bool:
    # A subset of PEP 440: a nightly build of torch compares equal to its release.
    return [int(part) for part in re.findall(r"\d+", version)[:3]] < [int(part) for part in least.split(".")]


def _size(size_bytes: float | None) -> str:
    return "an unknown amount" if size_bytes is None else size(size_bytes)
