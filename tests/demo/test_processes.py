"""Processes of the demo."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2ptrain.demo.orchestrator import Process, running_processes


def _wait(process: Process) -> int:
    while process.exit_status is None:
        time.sleep(0.01)
    return process.exit_status


def test_the_output_of_a_process_is_kept(tmp_path: Path) -> None:
    process = Process(["join", "--lr", "fast"], tmp_path / "peer-1" / "log.txt")
    assert _wait(process) == 2
    assert process.last_lines == ["p2ptrain: error: --lr: 'fast' is not a number, such as 0.003"]


def test_the_users_own_settings_do_not_change_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PTRAIN_LR", "fast")
    process = Process(["config", "show"], tmp_path / "log.txt")
    assert _wait(process) == 0


def test_a_command_can_be_put_before_it(tmp_path: Path) -> None:
    process = Process(["config", "show"], tmp_path / "log.txt", enter=("env", "P2PTRAIN_LR=fast"))
    assert _wait(process) == 2


def test_none_outlives_the_block(tmp_path: Path) -> None:
    with running_processes() as processes:
        processes.append(Process(["bootstrap", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"], tmp_path / "log.txt"))
        assert processes[0].exit_status is None
    assert processes[0].exit_status is not None
