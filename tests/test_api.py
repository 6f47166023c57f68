"""`p2ptrain.join` with a session that has no network: what a user is told."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import p2ptrain
from p2ptrain.settings.config import RunConfig
from tests.fakes import MADDR, FakeNetworkSession

WARNING = "no peers found for run 'x'; starting it (run_id= chooses another run)"


@pytest.mark.parametrize(
    ("initial_peers", "live", "resume", "warnings"),
    [
        ([MADDR], None, None, [WARNING]),
        ([MADDR], RunConfig(run_id="y"), None, [WARNING]),
        ([MADDR], RunConfig(run_id="x"), None, []),
        ([MADDR], None, {"step": 3}, []),
        ([], None, None, []),
    ],
)
def test_a_run_that_is_not_found_is_started_with_a_warning(
    initial_peers: list[str], live: RunConfig | None, resume: dict[str, int] | None, warnings: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("p2ptrain.api.NetworkSession", type("NetworkSession", (FakeNetworkSession,), {"live": live}))
    with caplog.at_level(logging.WARNING):
        peer = p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers=initial_peers, resume=resume)
    assert [record.getMessage() for record in caplog.records] == warnings
    assert getattr(peer, "founded", None) == (live is None or live.run_id == "y")
