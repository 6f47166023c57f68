"""`make pythons`: p2ptrain under every Python that this machine has, from 3.11 to 3.14.

For each, in a directory that is removed at the end: a fresh environment, `pip install` of this tree with the versions
of constraints.txt, and two peers on 127.0.0.1 that train until both have committed a round of two. It needs nothing but
the standard library. What it downloads is mostly torch, once for each Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINORS = range(11, 15)
# Only a hang lasts as long, on a busy machine too.
DEADLINE_S = 180.0
LEAVE_S = 30.0
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "p2ptrain-*")
SETTINGS = ("--steps", "100000", "--sync-every", "30", "--threads", "1", "--device", "cpu")


class SmokeError(Exception):
    """A step did not end as it should; the message names it and has its last output."""


def interpreters() -> dict[str, Path]:
    """Version and path of each Python found on PATH or as pyenv keeps them; the newest patch of each minor version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Path] = {}
    for minor in MINORS:
        on_path = shutil.which(f"python3.{minor}")
        for path in [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))]:
            # A shim of pyenv stands for a version that may not be there.
            asked = subprocess.run([path, "-c", "import platform, venv; print(platform.python_version())"],
                                   capture_output=True, text=True)  # fmt: skip
            if asked.returncode == 0:
                found[f"3.{minor}"] = path
    return found


def smoke(python: Path, folder: Path) -> str:
    """Install and train; returns what was shown to work. Raises SmokeError."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    _run("environment", python, "-m", "venv", folder / "venv")
    inside = folder / "venv/bin/python"
    _run("pip install", inside, "-m", "pip", "install", "--quiet", "-c", source / "constraints.txt", source)
    peers: list[subprocess.Popen[bytes]] = []
    try:
        first = _start_peer(folder, 1, peers)
        _until("the first peer's addresses", lambda: (folder / "addresses").exists(), peers, folder)
        second = _start_peer(folder, 2, peers, "--initial-peers", str(folder / "addresses"))
        _until("a round of both", lambda: bool(_rounds(first) & _rounds(second)), peers, folder)
        for peer in peers:
            peer.terminate()
        if statuses := [status for peer in peers if (status := peer.wait(LEAVE_S))]:
            raise SmokeError(f"a peer left with status {statuses[0]}: {_last_lines(folder)}")
    except subprocess.TimeoutExpired as error:
        raise SmokeError(f"a peer did not leave within {LEAVE_S:.0f} s") from error
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    return f"installed, and two peers committed round {min(_rounds(first) & _rounds(second))} together"


def _start_peer(folder: Path, number: int, peers: list[subprocess.Popen[bytes]], *more: str) -> Path:
    """Start a peer; returns its metrics file."""
    metrics = folder / f"{number}.jsonl"
    command = [
        folder / "venv/bin/p2ptrain", "join", "--out", folder / f"out-{number}", "--metrics", metrics, *SETTINGS,
        "--host-maddrs", "/ip4/127.0.0.1/tcp/0", *(more or ("--write-addresses", folder / "addresses")),
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("P2PTRAIN_", "PYTHON"))}
    with (folder / f"{number}.log").open("wb") as log:
        peers.append(
            subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )
    return metrics


def _rounds(metrics: Path) -> set[int]:
    """Rounds of two contributors that landed at a peer."""
    if not metrics.exists():
        return set()
    whole, _, _ = metrics.read_bytes().rpartition(b"\n")
    events = (json.loads(line) for line in whole.splitlines())
    return {
        event["round"]
        for event in events
        if event["event"] == "round" and event["status"] == "committed" and len(event["contributors"]) == 2
    }


def _until(what: str, condition: Callable[[], bool], peers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if any(peer.poll() is not None for peer in peers):
            raise SmokeError(f"a peer ended before {what}: {_last_lines(folder)}")
        if time.monotonic() > deadline_s:
            raise SmokeError(f"{what}: not within {DEADLINE_S:.0f} s: {_last_lines(folder)}")
        time.sleep(0.2)


def _last_lines(folder: Path) -> str:
    logs = (log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:] for log in sorted(folder.glob("*.log")))
    return " | ".join(line for lines in logs for line in lines)


def _run(what: str, *words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SmokeError(f"{what} failed: {' | '.join((done.stdout + done.stderr).splitlines()[-5:])}")


def main() -> int:
    """Exit status: 0 when p2ptrain works under every Python that was found."""
    found, failed = interpreters(), 0
    for minor, python in found.items():
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pythons-") as folder:
            try:
                result = smoke(python, Path(folder))
            except SmokeError as error:
                result, failed = f"FAILED: {error}", failed + 1
        print(f"Python {minor} ({python}): {result}; {time.monotonic() - began_s:.0f} s", flush=True)
    missing = [f"3.{minor}" for minor in MINORS if f"3.{minor}" not in found]
    if missing:
        print(f"not here, and so not tried: {', '.join(missing)}")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
