"""Restarts after failures, and when they are given up."""

from __future__ import annotations

from p2ptrain.protocol.restarts import Restarts


def test_each_restart_in_a_row_waits_for_its_time_and_then_it_is_given_up() -> None:
    restarts = Restarts((0.0, 1.0, 4.0), healthy_s=60.0)
    assert [restarts.next_delay_s(lived_s=10.0) for _ in range(5)] == [0.0, 1.0, 4.0, None, None]
    assert restarts.count == 3


def test_a_long_life_counts_anew() -> None:
    restarts = Restarts((0.0, 1.0), healthy_s=60.0)
    assert [restarts.next_delay_s(lived_s) for lived_s in (0, 0, 61, 60, 0)] == [0.0, 1.0, 0.0, 1.0, None]


def test_without_a_time_it_is_given_up_at_once() -> None:
    assert Restarts((), healthy_s=60.0).next_delay_s(0.0) is None
