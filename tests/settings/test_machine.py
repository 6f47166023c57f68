"""How many cores and how much memory a process may use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2ptrain.settings import machine


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max 100000", 8), ("200000 100000\n", 2), ("50000 100000", 1), ("1600000 100000", 8), ("nonsense", 8), (None, 8)],
)
def test_a_container_may_use_what_its_quota_allows(
    quota: str | None, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "CGROUP_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert machine.usable_cores() == usable


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's files")
def test_memory_that_caches_files_counts_as_free_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("3900000\n")
    assert machine.free_memory_bytes() == 100_000
    (tmp_path / "memory.stat").write_text("anon 900000\nfile 3000000\nactive_file 500000\ninactive_file 2500000\n")
    assert machine.free_memory_bytes() == 2_600_000
    (tmp_path / "memory.max").write_text("max\n")
    free = machine.free_memory_bytes()
    assert free is not None
    assert free > 4_000_000
