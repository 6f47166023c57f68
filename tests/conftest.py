"""For all tests: which of them start processes, that Ctrl-C stays what it was, and no time limit for examples."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from p2ptrain.signals import SIGNALS

pytest_plugins = ("tests.watchdog",)

# A machine that is busy is no failure: `tests/watchdog.py` ends tests that hang.
settings.register_profile("p2ptrain", deadline=None)
settings.load_profile("p2ptrain")

# Tests that start peers, browsers or many other programs: `make test` runs them after all others. Those of the network
# start little but its daemons.
STARTS_PEERS = (
    "swarm/", "examples/", "links/", "gpu/test_peers.py", "monitor/dashboard/test_page.py", "demo/test_demo.py",
    "demo/test_processes.py", "monitor/doctor/test_doctor.py", "test_site.py", "test_watchdog.py", "test_wheel.py",
)  # fmt: skip
# Files that take more than six seconds of a core each, ten minutes in all: swarms in virtual time, and whole models.
TAKES_LONG = (
    "hostile/test_attacks.py", "hostile/test_extremes.py", "integrations/", "peer/test_optimizers.py",
    "peer/test_pairs.py", "protocol/event_log/test_observer.py", "protocol/links/test_limits.py",
    "protocol/membership/test_made_up_records.py", "protocol/membership/test_membership.py",
    "protocol/node/test_fault_injection.py", "protocol/node/test_threads.py", "protocol/pairwise/test_pairwise.py",
    "protocol/rounds/deciding/test_guard.py", "protocol/rounds/moving/test_audit.py",
    "protocol/rounds/test_deadlines.py", "protocol/rounds/test_fault_injection.py", "protocol/rounds/test_liars.py",
    "protocol/rounds/test_refused_records.py", "protocol/rounds/test_round_faults.py",
    "protocol/rounds/test_round_limits.py", "protocol/rounds/test_withholding_reducers.py",
    "protocol/state_sync/test_provenance.py", "protocol/state_sync/test_state_sync.py", "protocol/test_hostile.py",
    "protocol/test_progress.py", "protocol/test_reliability.py", "protocol/test_storm.py",
    "simulation/test_algorithms.py", "simulation/test_fault_injection.py", "simulation/test_simulate.py",
    "training/test_join.py",
)  # fmt: skip
# What Python itself tells of a new process; those of `multiprocessing` without fork it does not.
STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"})

# Tests press Ctrl-C on processes that they start. A shell starts its background jobs with SIGINT ignored, and children
# inherit that: `make test &` would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

_started: list[str] = []


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    # `uname`: of Python's own `platform`, which hypothesis asks once; `file`: the same, asked by torch where there is a
    # GPU; `lscpu`: of joblib, without OMP_NUM_THREADS; `ldconfig`: of ifaddr, when it is imported.
    if event in STARTS and arguments[:1] not in (("uname",), ("file",), ("lscpu",), ("/sbin/ldconfig",)):
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_note_start)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare `-m "peers ..."` the reading of all other tests, which takes as long as a dozen of them."""
    if collection_path.is_dir() or not config.option.markexpr.startswith("peers"):
        return None
    return not _starts_peers(collection_path) or None


def _starts_peers(path: Path) -> bool:
    return _named(path).startswith(STARTS_PEERS)


def _named(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_peers(item.path):
            item.add_marker("peers")
            item.add_marker("processes")
        if _named(item.path).startswith(TAKES_LONG):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests say with `record_property("shown", ...)`, also those that ran in another process."""
    lines = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in getattr(report, "user_properties", ())
        if name == "shown"
    ]
    if lines:
        terminalreporter.section("what tests found")
        for line in lines:
            terminalreporter.write_line(str(line))


def pytest_collection_finish() -> None:
    """Forget processes that imports started: matplotlib lists the fonts on its first import."""
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """`make check` starts no process: a test that starts one says so with the marker."""
    try:
        return (yield)
    finally:
        started, _started[:] = _started[:], []
        if started and item.get_closest_marker("processes") is None:
            pytest.fail(f"this test starts a process, and lacks the marker `processes`: {started[0]}")


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test makes of Ctrl-C and SIGTERM ends with it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Commands set how much p2ptrain logs; those that a test runs in this process set it for that test alone."""
    before = {name: logger.level for name, logger in _loggers()}
    yield
    for name, logger in _loggers():
        logger.setLevel(before.get(name, logging.NOTSET))


def _loggers() -> list[tuple[str, logging.Logger]]:
    known = list(logging.Logger.manager.loggerDict.items())
    return [(name, log) for name, log in known if isinstance(log, logging.Logger) and name.startswith("p2ptrain")]
