"""A swarm that is larger than a round, in virtual time: real nodes, a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.thousand import RUN, simulate


@pytest.mark.slow
def test_a_swarm_larger_than_a_round_commits_the_same_rounds_on_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 peers 12 contribute to each round; three crash and give way to new ones meanwhile."""
    for name, value in {"MAX_DIALLED": 20, "NEIGHBOURS": 8, "MAX_NEIGHBOURS": 12}.items():
        monkeypatch.setattr(f"p2ptrain.protocol.membership.membership.{name}", value)
    run = dataclasses.replace(RUN, max_contributors=12, sync_every=20)
    result = simulate(40, 60.0, churn_per_hour=4.5, settle_s=25.0, run=run)
    assert result.rounds >= 2
    assert max(result.contributors) == 12
    assert result.behind <= 2
    assert result.discovered_s <= 60
    assert result.replaced >= 1
