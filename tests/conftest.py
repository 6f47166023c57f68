"""For all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.signals import SIGNALS

pytest_plugins = ("tests.watchdog",)

# Tests that start peers, browsers or other programs of their own. They take turns; all others may run side by side
# (`make test`), those of the network too, which start little but its daemons.
PROCESSES = ("swarm", "demo", "examples", "links", "dashboard", "doctor", "test_watchdog.py", "test_wheel.py")

# Tests press Ctrl-C on processes that they start. A shell starts its background jobs with SIGINT ignored, and children
# inherit that: `make test &` would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in PROCESSES:
            item.add_marker("processes")


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


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test makes of Ctrl-C and SIGTERM ends with it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
