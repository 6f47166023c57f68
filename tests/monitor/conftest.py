"""For all tests of what a person sees."""

from __future__ import annotations

import pytest

from tests.swarm.processes import NOT_A_PERSONS, TERMINAL


@pytest.fixture(autouse=True)
def _a_persons_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in CI, and where TERM=dumb."""
    for name in NOT_A_PERSONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
