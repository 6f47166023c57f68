"""Whose answer counts when a joiner asks for a run's settings, and when it need not wait for more."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.protocol.membership.lookup import SettingsAnswers
from p2ptrain.settings.config import RunConfig

FITTING, OTHER = RunConfig(sync_every=50), RunConfig(sync_every=70)
FOUND = ("a", "b", "c")


def answers(*chosen: str, ours: RunConfig | None = None) -> SettingsAnswers:
    return SettingsAnswers(chosen, ours, lambda run: run == FITTING)


def test_a_chosen_peer_counts_first_even_if_its_settings_cannot_be_used() -> None:
    asked = answers("a")
    asked.add("b", FITTING)
    assert not asked.is_enough(FOUND)
    useless = ConfigError("sync_every = 0")
    asked.add("a", useless)
    assert asked.best is useless
    assert asked.is_enough(FOUND)


def test_a_chosen_peer_that_failed_or_is_not_announced_is_not_waited_for() -> None:
    asked = answers("a", "x")
    asked.add("b", FITTING)
    assert not asked.is_enough(FOUND)
    asked.failures["a"] += 1
    assert asked.is_enough(FOUND)
    assert asked.best == FITTING


def test_settings_that_do_not_fit_count_when_all_have_answered() -> None:
    asked = answers()
    asked.add("a", OTHER)
    asked.failures["b"] += 1
    assert not asked.is_enough(FOUND)
    assert asked.untried(FOUND) == {"c"}
    asked.add("b", ConfigError("of another version"))
    asked.add("c", OTHER)
    assert asked.is_enough(FOUND)
    assert asked.best == OTHER
    asked.add("d", FITTING)
    assert asked.best == FITTING


def test_known_settings_are_changed_by_chosen_peers_only(caplog: pytest.LogCaptureFixture) -> None:
    asked = answers("a", ours=FITTING)
    asked.add("b", OTHER)
    assert asked.best is None
    assert "peer b trains run" in caplog.text
    asked.add("a", OTHER)
    assert asked.best == OTHER
