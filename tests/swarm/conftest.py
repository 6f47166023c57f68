"""A swarm for each test, which leaves nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.processes import Swarm


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as sockets:
        swarm = Swarm(tmp_path, Path(sockets))
        yield swarm
        swarm.close()
