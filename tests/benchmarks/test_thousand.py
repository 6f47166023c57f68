"""A swarm that is larger than a round, in virtual time: real nodes, a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.thousand import RUN, simulate


@pytest.mark.long
def test_a_swarm_larger_than_a_round_commits_the_same_rounds_on_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 peers 6 contribute to each round; some crash and give way to new ones meanwhile."""
    for name, value in {"MAX_DIALLED": 10, "NEIGHBOURS": 5, "MAX_NEIGHBOURS": 8}.items():
        monkeypatch.setattr(f"p2ptrain.protocol.membership.neighbours.{name}", value)
    run = dataclasses.replace(RUN, max_contributors=6, sync_every=10)
    result = simulate(20, 30.0, churn_per_hour=15.0, settle_s=10.0, run=run)
    assert result.rounds >= 2
    assert max(result.contributors) == 6
    assert result.behind <= 2
    assert result.discovered_s <= 60
    assert result.replaced >= 1
    # Links to some of the 19 others only (12.8 when this was written), and 6.0 kB for each step.
    assert result.links < 16
    assert result.bytes_per_step < 9000
