"""Machines for each test, gone at its end; every test is skipped where there can be none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Wires, why_not, wires
from tests.swarm.processes import Swarm


@pytest.fixture(scope="session")
def allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def net(allowed: None) -> Iterator[Wires]:
    with wires() as net:
        yield net


@pytest.fixture
def swarm(net: Wires, tmp_path: Path) -> Iterator[Swarm]:
    """Ended before the machines are."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as sockets:
        swarm = Swarm(tmp_path, Path(sockets))
        yield swarm
        swarm.close()
