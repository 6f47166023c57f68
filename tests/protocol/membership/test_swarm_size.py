"""The estimate of a swarm's size."""

from __future__ import annotations

import pytest

from p2ptrain.protocol.membership.swarm_size import SwarmSize


@pytest.mark.parametrize(("then", "expected"), [(62, 992), (66, 996), (125, 16 * 125)])
def test_the_size_is_counted_anew_if_it_has_changed(then: int, expected: float) -> None:
    size = SwarmSize(16)
    size.note_dial(reached=True)
    for key in range(16):
        size.note_count(key, 62, 0)
    for key in range(1 if then < 100 else 4):
        size.note_count(key, then, 0)
    assert size.estimate == expected


def test_announced_peers_that_are_not_linked_count_as_far_as_dials_reach_somebody() -> None:
    size = SwarmSize(16)
    for key in range(4):
        assert size.estimate == 0
        size.note_dial(reached=key == 0)
        size.note_count(key, 100, 20)
    assert size.estimate == 16 * (20 + 80 / 4)


def test_before_the_first_dial_only_linked_peers_count() -> None:
    size = SwarmSize(16)
    for key in range(16):
        size.note_count(key, 100, 1)
    assert size.estimate == 16
