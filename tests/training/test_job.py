"""What several ranks say when one of them is lost at the very end, with one rank and stubs for what comes before."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from p2ptrain.errors import PeerLostError, TransientError
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.settings.table import merge
from p2ptrain.settings.torchrun import ONE_PROCESS, Launch
from p2ptrain.signals import SIGNALS
from p2ptrain.training import job, join
from p2ptrain.training.loop import TrainingEnd
from p2ptrain.training.ranks import Ranks
from tests.fakes import FakeNetworkSession, FakePeer

LOST = r"^rank 1 \(process 7\) of the 1 processes of this peer has ended; unless"


@dataclass
class Told:
    config: Any
    saved: None = None


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def lost_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which finds at the end of its peer that another one has ended."""

    @contextmanager
    def open_ranks(launch: Launch) -> Iterator[Ranks]:
        group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
        ranks = Ranks()
        ranks._several = ProcessGroup(group, torch.device("cpu"))
        ranks._pids = [0, 7]
        yield ranks

    def end(self: object, *error: object) -> None:
        raise PeerLostError("connection closed")

    monkeypatch.setattr(Ranks, "_gone", lambda self: [1])
    monkeypatch.setattr(FakePeer, "__exit__", end)
    for module in (job, join):
        monkeypatch.setattr(module, "open_ranks", open_ranks)


def test_rank_0_says_that_another_was_lost_after_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = type("NetworkSession", (FakeNetworkSession,), {})  # it notes in its class what was done
    monkeypatch.setitem(sys.modules, "p2ptrain.peer.session", types.SimpleNamespace(NetworkSession=session))
    monkeypatch.setattr(join, "take_part", lambda *given, **named: TrainingEnd("finished"))
    trainer = types.SimpleNamespace(optimizer=types.SimpleNamespace(adamw=None))
    monkeypatch.setattr(join, "build_trainer", lambda *given: (trainer, None, None))
    text = tmp_path / "text.txt"
    text.write_text("a b c\n" * 1000)
    settings = merge({"run_id": "r", "out": str(tmp_path / "out"), "device": "cpu", "data": str(text)}, {})
    lines: list[str] = []
    with pytest.raises(TransientError, match=LOST):
        join.join_run(settings, *join.check_local(settings), say=lines.append, on_progress=lambda progress: None)
    assert lines[-1].startswith("finished at step 0")


def test_the_others_say_it_too_and_ignore_the_signals_that_they_were_started_with_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: list[Any] = []

    def take_part(*given: Any, **named: Any) -> TrainingEnd:
        handlers.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        return TrainingEnd("finished")

    member = FakePeer.__new__(FakePeer)
    stubs: dict[str, Any] = {
        "be_told": Told(types.SimpleNamespace(threads=0)), "build_model": None,
        "build_trainer": (None, None, None), "join_ranks": (member, None),
    }  # fmt: skip
    for name, result in stubs.items():
        monkeypatch.setattr(job, name, lambda *given, result=result: result)
    monkeypatch.setattr(job, "take_part", take_part)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(TransientError, match=LOST):
        job.follow(ONE_PROCESS)
    assert handlers == [signal.SIG_IGN, signal.SIG_DFL]
