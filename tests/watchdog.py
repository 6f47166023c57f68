"""A pytest plugin: nothing that a test starts outlives its time limit, and no test can hang the whole run.

pytest-timeout interrupts a test once. A test that then waits for a process, as `with subprocess.Popen(...)` does, waits
for ever, and so may a fixture that cleans up. So, shortly after the limit, every process that the tests have started is
killed, and if the test still has not ended after GRACE_S, pytest prints all stacks and exits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator

import psutil
import pytest
import pytest_timeout

# Between pytest-timeout's interruption and the kill. A guess: enough for a test that cleans up behind itself.
SLACK_S = 2.0
# Between the kill and the end of pytest. A guess: other fixtures may have peers to end, which takes up to 12 s each.
GRACE_S = 60.0
# In the environment of every process that the tests start, so that orphans are found too. A pytest that a test starts
# adds its own mark to ours.
VARIABLE = "STARTED_BY_TESTS"
MARK = f"{os.getpid()}-{secrets.token_hex(4)}"

_ended: dict[str, threading.Event] = {}


def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')}/{MARK}"


def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
    """Watch a test that has a limit; returns None, so that pytest-timeout sets its own timer as well."""
    ended = _ended[item.nodeid] = threading.Event()
    threading.Thread(target=_watch, args=(item, settings, ended), name="test-watchdog", daemon=True).start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test has ended when its fixtures have: pytest-timeout's own timer is gone as soon as the test has failed."""
    try:
        return (yield)
    finally:
        if ended := _ended.pop(item.nodeid, None):
            ended.set()


def kill_what_tests_started() -> None:
    """SIGKILL to every process that descends from this one or carries its mark."""
    for _ in range(5):  # some may start others meanwhile
        found = [process for process in psutil.process_iter() if _is_running(process) and _is_ours(process)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _watch(item: pytest.Item, settings: pytest_timeout.Settings, ended: threading.Event) -> None:
    if ended.wait(settings.timeout + SLACK_S) or pytest_timeout.is_debugging():
        return
    kill_what_tests_started()
    if ended.wait(GRACE_S):
        return
    kill_what_tests_started()
    pytest_timeout.timeout_timer(item, settings)  # prints all stacks and exits


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        if MARK in process.environ().get(VARIABLE, "").split("/"):
            return True
    with contextlib.suppress(psutil.Error):
        return os.getpid() in (parent.pid for parent in process.parents())
    return False
