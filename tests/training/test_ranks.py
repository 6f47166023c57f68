"""A process of a peer that hangs is given up after minutes; one that ends is in tests/swarm/test_torchrun.py."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch.distributed as dist

from p2ptrain.errors import TransientError
from p2ptrain.settings.torchrun import Launch
from p2ptrain.training import ranks
from p2ptrain.training.ranks import Ranks, open_ranks
from tests.peer.ranks import on_all_ranks


def test_a_rank_that_does_not_start_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STEP_TIMEOUT", datetime.timedelta(seconds=0.05))
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(TransientError, match=r"the 2 processes of this peer have not all started within 0\.05 s;"):
        with open_ranks(Launch(0, 2)):
            pass


def test_a_rank_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ignore_signals", lambda: None)  # this is not the main thread
    monkeypatch.setattr(ranks, "GONE_TIMEOUT_S", 0.0)
    is_said = threading.Event()

    def work(rank: int, group: dist.ProcessGroup) -> str:
        members = Ranks(group)
        assert members._several is not None
        assert members._several._sockets is not None
        members._several._sockets._timeout_s = 0.5
        try:
            with members.lost_ranks_reported():
                if rank == 1:
                    is_said.wait()
                else:
                    members.total(1.0)
        except TransientError as error:
            return str(error)
        finally:
            is_said.set()
        return ""

    said, silent = on_all_ranks(work, size=2)
    assert said.startswith("one of the 2 processes of this peer has not answered within 600 s; start them again")
    assert silent == ""
