"""Where a peer's events go. A sink that fails loses its own events only; the metrics file holds complete lines only.

That file is tested on a full disk, and after a peer was killed while writing.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.peer import sinks
from p2ptrain.peer.sinks import REST_S, MetricsFile, Sinks


class Kept:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.closed = False

    def write(self, event: str, /, **fields: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Broken(Kept):
    def write(self, event: str, /, **fields: Any) -> None:
        raise ZeroDivisionError("in a sink")

    def close(self) -> None:
        raise ZeroDivisionError("at the end")


def test_a_broken_sink_is_logged_once_and_the_others_get_everything(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Kept(), Kept()
    sinks = Sinks([before, Broken(), after])
    for _ in range(5):
        sinks.write("step", loss=1.0)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "Broken has lost an event 'step': ZeroDivisionError('in a sink'); please report this"
    ]
    sinks.close()
    for sink in (before, after):
        assert sink.events == ["step"] * 5
        assert sink.closed


class FullDisk:
    """A file on a disk with `room` bytes left."""

    def __init__(self, file: Any, room: int) -> None:
        self.room = room
        self._file = file

    def write(self, line: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(line[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


class Rest:
    """The event on which the thread waits between lines; its time runs out when the test says so."""

    def __init__(self) -> None:
        self.limits_s = queue.Queue[float]()
        self.runs_out = threading.Event()
        self.clear = self.runs_out.clear
        self.times_cut_short = 0

    def set(self) -> None:
        self.times_cut_short += 1
        self.runs_out.set()

    def wait(self, limit_s: float) -> None:
        self.limits_s.put(0.0 if self.runs_out.is_set() else limit_s)
        self.runs_out.wait()


def test_a_disk_that_hangs_does_not_keep_a_peer_from_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "CLOSE_TIMEOUT_S", 0.05)
    disk_goes_on, hangs, metrics = threading.Event(), threading.Event(), MetricsFile(tmp_path / "metrics.jsonl")

    def append(line: bytes) -> None:
        hangs.set()
        disk_goes_on.wait()

    monkeypatch.setattr(metrics, "_append", append)
    metrics.write("round")
    assert hangs.wait(10)
    for _ in range(sinks.MAX_WAITING + 1):
        metrics.write("round")
    metrics.close()
    assert metrics._thread.is_alive()
    disk_goes_on.set()
    monkeypatch.setattr(sinks, "CLOSE_TIMEOUT_S", 10.0)
    metrics.close()
    assert not metrics._thread.is_alive()


def test_lines_of_steps_wait_for_each_other_and_no_other_line_does(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics, rest = MetricsFile(path), Rest()
    metrics._urgent = rest  # type: ignore[assignment]

    def written() -> list[str]:
        """What is in the file once the thread rests again."""
        assert rest.limits_s.get() == REST_S
        return [json.loads(line)["event"] for line in path.read_text().splitlines()]

    metrics.write("step")
    assert written() == ["step"]
    for _ in range(2):
        metrics.write("step")
    assert rest.times_cut_short == 0
    assert len(path.read_text().splitlines()) == 1
    rest.runs_out.set()
    assert written() == ["step"] * 3
    metrics.write("step")
    metrics.write("round")
    assert rest.times_cut_short == 1
    assert written() == [*["step"] * 4, "round"]
    metrics.write("step")
    metrics.close()
    assert path.read_text().count("step") == 5


def test_lines_are_whole_and_losses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disks: list[FullDisk] = []
    open_file = Path.open

    def open_full(path: Path, *arguments: Any, **options: Any) -> FullDisk:
        disks.append(FullDisk(open_file(path, *arguments, **options), room=100))
        return disks[0]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for number in range(10):
        metrics.write("early", number=number)
    while len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) + metrics._lost < 10:
        time.sleep(0.01)  # the test's time limit is the deadline
    disks[0].room = 10**6
    for number in range(10):
        metrics.write("late", number=number)
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    early, late = ([line["number"] for line in lines if line["event"] == event] for event in ("early", "late"))
    assert early == list(range(len(early)))
    assert 0 < len(early) < 10
    assert late == list(range(10))
    lost, again = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert lost == "metrics are being lost: No space left on device; training goes on"
    assert again == f"metrics are written again; {10 - len(early)} lines were lost"


def test_a_disk_that_stays_full_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(Path("/dev/full"))
    for _ in range(5):
        metrics.write("step")
    metrics.close()
    (message,) = caplog.messages
    assert message == "metrics are being lost: No space left on device; training goes on"


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metrics .*: cannot be written \(Is a directory\)"):
        MetricsFile(tmp_path)


@pytest.mark.parametrize("cut", [b"", b'{"event": "st', b'{"event": "step", "t": 3}'])
@pytest.mark.parametrize("whole", [b"", b'{"event": "start", "t": 1}\n', b'{"event": "start", "t": 1}\n' * 100_000])
def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path, whole: bytes, cut: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole + cut)
    metrics = MetricsFile(path)
    metrics.write("start", peer_id="a")
    metrics.close()
    *before, last = path.read_bytes().splitlines()
    assert before == whole.splitlines()
    assert json.loads(last)["peer_id"] == "a"


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    """Such as /dev/stdout, which cannot be read back."""
    metrics = MetricsFile(Path("/dev/null"))
    metrics.write("start")
    metrics.close()


class Unreadable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def test_values_that_json_lacks_do_not_end_the_file(tmp_path: Path) -> None:
    """A diverged loss, and whatever a user's own event holds."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write("step", loss=math.nan, list=[1.0, math.inf], numpy=np.int64(3), tensor=torch.tensor(2.5))
    metrics.write("odd", many=torch.zeros(2), set={1}, key={1: 2}, unreadable=Unreadable())
    circle: list[Any] = []
    circle.append(circle)
    metrics.write("circle", circle=circle)
    metrics.write("last")
    metrics.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "odd", "circle", "last"]
    values = {key: value for key, value in lines[0].items() if key not in ("event", "t")}
    assert values == {"loss": None, "list": [1.0, None], "numpy": 3, "tensor": 2.5}
    assert lines[1]["many"] == "tensor([0., 0.])"
    assert lines[1]["unreadable"] == "<Unreadable>"
