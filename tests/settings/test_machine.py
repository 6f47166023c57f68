"""How many cores a process may use."""

from __future__ import annotations

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
