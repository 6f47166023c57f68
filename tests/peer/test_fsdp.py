"""A model that FSDP2 has sharded over two and four processes is trained as one peer, with the bits of one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCENARIOS = ["fragments_and_rounds/2", "fragments_and_rounds/4", "real_peers/2", "refusals/4"]
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def failures() -> dict[str, list[str]]:
    """What went wrong, by scenario. All run in one process, because the import of torch takes longest."""
    command = [sys.executable, "-m", "tests.peer.fsdp_ranks", *SCENARIOS]
    ranks = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in ranks.stdout.splitlines())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_sharded_model_is_one_peer(scenario: str, failures: dict[str, list[str]]) -> None:
    assert not failures[scenario], "\n".join(failures[scenario])
