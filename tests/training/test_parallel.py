"""Settings with which a model cannot be sharded. Sharded training itself is in tests/swarm/two_ranks.py."""

from __future__ import annotations

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.settings.peer_config import PeerConfig
from p2ptrain.training.parallel import check_fsdp


def test_what_does_not_go_together_is_refused() -> None:
    check_fsdp(PeerConfig(compile="on"), 1)
    check_fsdp(PeerConfig(fsdp="on"), 2)
    with pytest.raises(ConfigError, match=r"--fsdp on: needs several processes; start them with torchrun, or leave"):
        check_fsdp(PeerConfig(fsdp="on"), 1)
    with pytest.raises(ConfigError, match=r"--fsdp on: does not go together with --compile on; leave one of them out"):
        check_fsdp(PeerConfig(fsdp="on", compile="on"), 2)
