"""Processes of the demo, and what killed ones leave behind."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.demo.processes import Process, remove_dead_sockets, running_processes


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The path of a unix socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def _wait(process: Process) -> int:
    while process.exit_status is None:
        time.sleep(0.01)
    return process.exit_status


def test_what_a_process_says_is_kept(tmp_path: Path) -> None:
    process = Process(["join", "--lr", "fast"], tmp_path / "peer-1" / "log.txt")
    assert _wait(process) == 2
    assert process.last_lines == ["p2ptrain: error: --lr: 'fast' is not a number, such as 0.003"]


def test_the_users_own_settings_do_not_change_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PTRAIN_LR", "fast")
    process = Process(["config", "show"], tmp_path / "log.txt")
    assert _wait(process) == 0


def test_none_outlives_the_block(tmp_path: Path) -> None:
    with running_processes() as processes:
        processes.append(Process(["bootstrap", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"], tmp_path / "log.txt"))
        assert processes[0].exit_status is None
    assert processes[0].exit_status is not None


def test_only_sockets_that_nobody_listens_on_are_removed(short_path: Path) -> None:
    dead, alive, other = (short_path / name for name in ("p2ptrain-dead", "p2ptrain-alive", "somebody-elses"))
    for directory in (dead, alive, other):
        directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(alive / "p2pd.sock"))
        listening.listen()
        for directory in (dead, other):
            with socket.socket(socket.AF_UNIX) as closed:
                closed.bind(str(directory / "p2pd.sock"))
        remove_dead_sockets(short_path)
        assert {path.name for path in short_path.iterdir()} == {"p2ptrain-alive", "somebody-elses"}
