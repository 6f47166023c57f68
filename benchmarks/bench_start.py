"""Time from the command to the first step, when starting a run and when joining one, with the demo model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import WorkerError, descendants
from benchmarks.row import Row, limited_row

REPEATS = 3
TIMEOUT_S = 60.0


def run() -> list[Row]:
    start_s, join_s = [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(prefix="p2ptrain-") as name:
            directory = Path(name)
            addresses = directory / "addresses"
            with _peer(directory / "first", "--write-addresses", str(addresses)) as took_s:
                start_s.append(took_s)
                with _peer(directory / "second", "--initial-peers", str(addresses)) as took_s:
                    join_s.append(took_s)
    return [_row("start to first step", start_s, 6.0), _row("join to first step in a live run", join_s, 10.0)]


@contextlib.contextmanager
def _peer(out: Path, *flags: str) -> Iterator[float]:
    """Start `p2ptrain join` and yield the seconds until its first step; it trains on until the block ends."""
    arguments = ["join", "--out", str(out), "--steps", "0", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--threads", "1"]
    command = [sys.executable, "-c", "from p2ptrain.cli.main import main; main()", *arguments, *flags]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        _wait_for_step(out / "metrics.jsonl", process, started + TIMEOUT_S)
        yield time.perf_counter() - started
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20.0)
    finally:
        for left in descendants(process.pid):
            left.kill()
        process.wait()


def _wait_for_step(metrics: Path, process: subprocess.Popen[bytes], deadline: float) -> None:
    while not (metrics.exists() and '"event":"step"' in metrics.read_text().replace(" ", "")):
        if process.poll() is not None:
            raise WorkerError(f"p2ptrain join ended with status {process.returncode}")
        if time.perf_counter() > deadline:
            raise WorkerError("p2ptrain join took no step in time")
        time.sleep(0.02)


def _row(work: str, seconds: list[float], limit_s: float) -> Row:
    return limited_row(f"{work}, demo model, `p2ptrain join`", seconds, limit_s)
