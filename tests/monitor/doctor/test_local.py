"""The doctor's checks of given machines, and reading the facts of this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2ptrain.monitor.doctor import local
from p2ptrain.monitor.doctor.finding import Finding, Mark, works
from p2ptrain.monitor.doctor.local import Machine, check_gpu, check_machine, check_versions, quick_look, read_machine
from p2ptrain.monitor.estimate import vectors_more
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.models import PRESETS, build, count_parameters
from tests.training.characters import VOCAB_SIZE

GOOD = Machine(
    versions={"Python": "3.11.7", "torch": "2.13.0+cpu", "hivemind": "1.1.12", "p2ptrain": "0.1.0"},
    cores=8, threads=8, native=True, memory_bytes=16_000_000_000, disk_bytes=100_000_000_000, writable=True,
    open_files=4096, gpu=None, gpu_bytes=None,
)  # fmt: skip
GPU = replace(GOOD, gpu="H200", gpu_bytes=140_000_000_000)
M124 = 124_439_808
OUT = Path("p2ptrain-r")


def _findings(
    machine: Machine, *, model: str = "gpt2-124m", num_parameters: int | None = M124, device: str = "auto"
) -> dict[str, Finding]:
    found = check_machine(machine, out=OUT, model=model, num_parameters=num_parameters, device=device)
    return {finding.check: finding for finding in found}


def test_nothing_is_wrong_with_a_good_machine() -> None:
    for machine in (GOOD, GPU):
        found = _findings(machine)
        assert {finding.mark for finding in found.values()} == {Mark.OK}
        assert not any(finding.remedy for finding in found.values())
    # 7.7 x the parameters in fp32 and the libraries; five vectors in a checkpoint, four checkpoints at once.
    assert _findings(GOOD)["memory"].text == "16 GB free; gpt2-124m needs 4.3 GB in a round, plus its batch"
    assert _findings(GOOD)["disk"].text == "100 GB free for p2ptrain-r; checkpoints of gpt2-124m need 10 GB"
    assert _findings(GPU)["memory"].text == "16 GB free; gpt2-124m needs 2.3 GB in a round, plus its batch"
    assert _findings(GPU)["GPU memory"].text == "140 GB free; gpt2-124m needs 2.0 GB, plus its batch"


def test_error_buffers_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = vectors_more(RunConfig(round_codec="int2"))
    found = check_machine(GOOD, out=OUT, model="gpt2-124m", num_parameters=M124, device="cpu", vectors=vectors)
    (memory,) = (finding for finding in found if finding.check == "memory")
    assert memory.text == "16 GB free; gpt2-124m needs 5.2 GB in a round, plus its batch"
    monkeypatch.setattr(local, "read_machine", lambda out, device: replace(GOOD, memory_bytes=6_000_000_000))
    assert quick_look(OUT, "gpt2-124m", "cpu", num_parameters=M124) == []
    (finding,) = quick_look(OUT, "gpt2-124m", "cpu", num_parameters=M124, vectors=vectors)
    assert finding.check == "memory"


def test_missing_native_loops_are_reported_and_are_no_problem() -> None:
    found = _findings(replace(GOOD, native=False))["processor"]
    assert found.mark is Mark.OK
    assert found.text.endswith("rounds take longer without native loops: install a C compiler, then p2ptrain again")


@pytest.mark.parametrize(
    ("machine", "device", "check", "mark", "text", "remedy"),
    [
        (replace(GOOD, threads=16), "auto", "processor", Mark.WARNING, "8 cores, 16 torch threads", "add --threads 8"),
        (GOOD, "cuda:1", "GPU", Mark.FAILED, "torch finds none, but --device is cuda:1", "--device cpu"),
        (replace(GOOD, memory_bytes=4_000_000_000), "auto", "memory", Mark.FAILED, "4.0 GB free", "--model"),
        (replace(GOOD, memory_bytes=5_000_000_000), "auto", "memory", Mark.WARNING, "5.0 GB free", "--micro-batch 1"),
        (replace(GPU, gpu_bytes=1_000_000_000), "auto", "GPU memory", Mark.FAILED, "1.0 GB free", "nvidia-smi"),
        (replace(GOOD, disk_bytes=9_000_000_000), "auto", "disk", Mark.WARNING, "need 10 GB", "larger disk"),
        (replace(GOOD, writable=False), "auto", "disk", Mark.FAILED, "p2ptrain-r is not writable", "--out"),
        (replace(GOOD, open_files=256), "auto", "open files", Mark.WARNING, "256 allowed", "ulimit -n 4096"),
        (replace(GOOD, open_files=64), "auto", "open files", Mark.FAILED, "64 allowed", "ulimit -n 4096"),
    ],
)
def test_each_problem_is_reported_with_its_remedy(
    machine: Machine, device: str, check: str, mark: Mark, text: str, remedy: str
) -> None:
    found = _findings(machine, device=device)
    assert found[check].mark is mark
    assert text in found[check].text
    assert remedy in found[check].remedy
    assert [name for name, finding in found.items() if finding.mark is not Mark.OK] == [check]
    assert works(list(found.values())) == (mark is not Mark.FAILED)


@pytest.mark.parametrize(
    ("name", "version", "remedy"),
    [
        ("hivemind", "", "pip install 'hivemind>=1.1.12'"),
        ("hivemind", "1.1.11", "pip install 'hivemind>=1.1.12'"),
        ("torch", "2.3.1", "pip install 'torch>=2.4'"),
        ("Python", "3.10.12", "install Python 3.11 or newer"),
    ],
)
def test_missing_and_old_versions(name: str, version: str, remedy: str) -> None:
    finding = check_versions(replace(GOOD, versions={**GOOD.versions, name: version}))
    assert (finding.mark, finding.remedy) == (Mark.FAILED, remedy)


def test_unknown_facts_are_no_problem() -> None:
    found = _findings(replace(GOOD, memory_bytes=None, disk_bytes=None, open_files=None), num_parameters=None)
    assert {finding.mark for finding in found.values()} == {Mark.OK}
    assert "is unknown" in _findings(replace(GOOD, memory_bytes=None))["memory"].text


def test_this_machine_is_read(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "not" / "there", device="cpu")
    assert all(machine.versions.values())
    assert machine.cores >= 1
    assert machine.disk_bytes
    assert machine.writable
    (tmp_path / "file").touch()
    assert not read_machine(tmp_path / "file", device="cpu").writable
    assert not read_machine(Path("/proc/x"), device="cpu").writable
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("device", "gpu", "found"),
    [
        ("cuda:1", "GPU 1", Mark.OK), ("cuda", "GPU 0", Mark.OK), ("auto", "GPU 0", Mark.OK), ("cpu", None, Mark.OK),
        ("cuda:2", None, Mark.FAILED), ("foo", None, Mark.OK),
    ],
)  # fmt: skip
def test_the_gpu_of_the_device_is_read(
    device: str, gpu: str | None, found: Mark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000 + index, 2000))
    machine = read_machine(tmp_path, device=device)
    assert (machine.gpu, machine.gpu_bytes) == (gpu, None if gpu is None else 1000 + int(gpu[-1]))
    assert check_gpu(machine, device).mark is found


def test_a_quick_look_returns_only_problems_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter([GOOD, replace(GOOD, threads=9)])
    monkeypatch.setattr(local, "read_machine", lambda out, device: next(machines))
    assert quick_look(OUT, "gpt2-124m", "cpu", num_parameters=124_000_000) == []
    found = quick_look(OUT, "my.module:factory", "cpu", num_parameters=None)
    assert [finding.check for finding in found] == ["processor"]
    assert quick_look(OUT, "gpt2-124m", "cpu", num_parameters=None) == []  # there is no third machine


@pytest.mark.parametrize("name", ["gpt-demo", "gpt-small", "diloco-60m"])
def test_parameters_are_counted_without_building_the_model(name: str) -> None:
    model = build(name, vocab_size=VOCAB_SIZE, seed=0)
    assert count_parameters(name, vocab_size=VOCAB_SIZE) == sum(p.numel() for p in model.parameters())
    assert name in PRESETS
