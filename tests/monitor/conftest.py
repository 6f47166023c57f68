"""Fixtures for all tests of user interfaces."""

from __future__ import annotations

import pytest

from tests.swarm.processes import NOT_A_PERSONS, TERMINAL


@pytest.fixture(autouse=True)
def _a_persons_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a terminal, even in CI or with TERM=dumb."""
    for name in NOT_A_PERSONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
