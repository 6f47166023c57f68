"""What torchrun's variables say of this process."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.settings.torchrun import ONE_PROCESS, Launch, launch_of

GIVEN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}


def test_torchrun_starts_the_ranks_of_one_peer() -> None:
    assert launch_of(GIVEN) == Launch(rank=3, size=8)


def test_variables_of_other_launchers_mean_nothing() -> None:
    assert launch_of({}) == ONE_PROCESS
    assert launch_of({"RANK": "3", "WORLD_SIZE": "8"}) == ONE_PROCESS


def test_each_machine_is_a_peer() -> None:
    with pytest.raises(ConfigError, match=r"torchrun: 16 processes, and 8 of them on this machine; start .* --nnodes"):
        launch_of({**GIVEN, "WORLD_SIZE": "16"})
