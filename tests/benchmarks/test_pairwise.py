"""The benchmark of random pairs against rounds, on a small scale."""

from __future__ import annotations

import pytest

from benchmarks import pairwise


@pytest.mark.long
def test_pairs_learn_from_each_other_and_all_end_with_one_average() -> None:
    arms = {arm: pairwise.run(arm, 4, 0, (100, 50, 30)) for arm in pairwise.ARMS}
    assert arms["pairwise"]["contributors"] == [4]
    assert arms["pairwise"]["paired"] > 0.5
    assert 0 < arms["pairwise"]["spread"] < 0.5
    assert arms["parts"]["loss"] < arms["alone"]["loss"]
    assert arms["pairwise"]["loss"] < arms["alone"]["loss"]
    # Three steps of one model and the last round, against two rounds; with more of both, they are equal.
    assert 0.8 < arms["pairwise"]["mb_per_peer"] / arms["parts"]["mb_per_peer"] < 1.6
    lines = pairwise.table(list(arms.values())).splitlines()
    assert len(lines) == 1 + len(arms)
