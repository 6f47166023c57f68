"""For all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# Tests that start peers, browsers or other programs of their own. They take turns; all others may run side by side
# (`make test`), those of the network too, which start little but its daemons.
PROCESSES = (
    "swarm/", "examples/", "links/", "demo/test_demo.py", "dashboard/test_page.py", "doctor/test_doctor.py",
    "test_wheel.py",
)  # fmt: skip

# Tests press Ctrl-C on processes that they start. A shell starts its background jobs with SIGINT ignored, and children
# inherit that: `make test &` would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(PROCESSES):
            item.add_marker("processes")
