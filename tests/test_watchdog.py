"""The watchdog of the tests: pytest runs a file with a test that hangs, ends, and leaves none of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import watchdog

watchdog.SLACK_S = 0.2
watchdog.GRACE_S = 5.0
"""
TESTS = """
import contextlib, subprocess, sys, time
from pathlib import Path

SLEEP = "import time; time.sleep(100_000)"
LEAVE_AN_ORPHAN = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"


def note(pid):
    with Path("pids").open("a") as file:
        file.write(f"{pid}\\n")


def test_that_waits_for_its_child():
    with subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True) as child:
        note(child.pid)
        child.wait()


def test_whose_orphan_holds_a_pipe():
    command = [sys.executable, "-c", LEAVE_AN_ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        note(int(child.stdout.readline()))
        try:
            child.stdout.read()
        finally:
            child.stdout.read()


def test_that_ends():
    pass
"""
STUBBORN = """
def test_that_nothing_interrupts():
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as child:
        note(child.pid)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(100)
"""


def _pytest(folder: Path, tests: str) -> tuple[int, str, list[int]]:
    """Exit status and output of pytest, with a limit of four seconds a test; and the ids of the processes started."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_hanging.py").write_text(tests, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.watchdog", "-p", "no:xdist", "-p", "no:cacheprovider",
         "--timeout", "4", "-v"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    started = [int(line) for line in (folder / "pids").read_text(encoding="utf-8").split()]
    return done.returncode, done.stdout + done.stderr, started


def _is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_a_test_started_dies_with_its_time_limit_and_the_next_test_runs(tmp_path: Path) -> None:
    status, printed, started = _pytest(tmp_path, TESTS)
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert "2 failed, 1 passed" in printed
    assert len(started) == 2
    assert not any(map(_is_there, started))


def test_a_test_that_nothing_interrupts_ends_the_run_and_all_stacks_are_shown(tmp_path: Path) -> None:
    status, printed, started = _pytest(tmp_path, TESTS.partition("def test_that_waits")[0] + STUBBORN)
    assert status == 1, printed
    assert "test_that_nothing_interrupts" in printed
    assert "Stack of" in printed or "Timeout" in printed
    assert len(started) == 1
    assert not any(map(_is_there, started))
