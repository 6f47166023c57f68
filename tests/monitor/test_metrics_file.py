"""The metrics stream on disk, after a peer that was killed while it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.monitor.metrics_file import MetricsFile


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
    """Such as /dev/stdout: nothing can be read back there."""
    metrics = MetricsFile(Path("/dev/null"))
    metrics.write("start")
    metrics.close()
