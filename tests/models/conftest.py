"""For the models: their many cases are read only where they run, and `make models` ends with their number."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = "test_ten.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare other runs the import of all that the long ones need, which takes many seconds."""
    is_long = collection_path.name.startswith("test_") and collection_path.name != QUICK
    return (is_long and "not long" in config.option.markexpr) or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    lines = [str(value) for report in passed for name, value in report.user_properties if name == "shown"]
    trained, refused = (sum(outcome in text for text in lines) for outcome in ("  trained", "  refused: "))
    if trained + refused:
        terminalreporter.write_line(f"{trained + refused} kinds of models: {trained} trained, {refused} refused")
