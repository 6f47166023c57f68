"""A short real demo over libp2p, with one peer killed and one late, and Ctrl-C. No process may be left."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.demo.demo import MARKER

LEFT_BEHIND = "P2PDEMO_TEST"


class Demo:
    """A demo in its own process group; an environment variable marks its descendants."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self._mark = f"{LEFT_BEHIND}={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "p2ptrain", "demo", "--plain", "--peers", "2", "--out", str(out), *arguments],
            env={**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": "1", name: value},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        yield from self.process.stdout

    def left_behind(self) -> list[str]:
        """Command lines of its descendants that still run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text(encoding="utf-8"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.kill()


def test_two_peers_train_lose_one_and_gain_one(tmp_path: Path, demos: list[Demo]) -> None:
    out = tmp_path / "demo"
    demo = Demo(out, "--minutes", "0.6", "--seed", "3")
    demos.append(demo)
    text = "".join(demo.lines())
    assert demo.process.wait() == 0, text
    assert demo.left_behind() == []

    for event in ("founded the run", "killed (SIGKILL) at step", "all other peers noticed", "peer 3 joined late"):
        assert event in text
    assert "committed by 2 peers" in text
    assert (out / "summary.txt").read_text(encoding="utf-8") in text
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / MARKER).exists()
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["same_anchor"]
    assert results["merged"] < 3.5
    assert results["correlation_end"] > 0.99
    assert results["traffic"]["dense"] == 4 * results["parameters"]
    generated = subprocess.run(
        [sys.executable, "-m", "p2ptrain", "generate", str(out), "--length", "5"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert generated.stdout.startswith("def ")


@pytest.mark.long
def test_ctrl_c_ends_everything(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path / "demo")
    demos.append(demo)
    lines = []
    for line in demo.lines():
        lines.append(line)
        if "founded the run" in line:
            os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait() == 130, lines
    assert lines[-1] == "p2ptrain: interrupted\n"
    assert demo.left_behind() == []
