"""Kill one of three peers (kill -9): time until the others commit a round, and until the restarted peer contributes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.processes import WorkerError, descendants
from benchmarks.row import Row, limited_row

T = TypeVar("T")
Event = dict[str, Any]

PEERS = 3
# Each peer is killed twice, including the one that started the run.
KILLS = 6
# Inner steps between rounds: about three seconds of the paced demo model on two cores.
SYNC_EVERY = 200
# Rounds that are observed to predict when the next one is due.
SETTLED_ROUNDS = 4
TIMEOUT_S = 120.0


class Peer:
    """A `p2ptrain join` process with its own output directory, which it uses again after a kill."""

    def __init__(self, out: Path, *flags: str) -> None:
        self.addresses = out / "addresses"
        self._out = out
        self.launch(*flags)

    def launch(self, *flags: str) -> None:
        """Start or restart the process."""
        arguments = ["join", "--out", str(self._out), "--model", "benchmarks.paced:half_a_core", "--threads", "1"]
        arguments += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--write-addresses", str(self.addresses), *flags]
        command = [sys.executable, "-c", "from p2ptrain.cli.main import main; main()", *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started_s = time.time()
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, start_new_session=True
        )

    def kill(self) -> float:
        """Send SIGKILL. Returns the time of it, in seconds since the epoch."""
        self._process.kill()
        killed_s = time.time()
        self._process.wait()
        return killed_s

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20.0)
        for left in descendants(self._process.pid):
            left.kill()
        self._process.wait()

    def check(self) -> None:
        if self._process.poll() is not None:
            raise WorkerError(f"p2ptrain join ended with status {self._process.returncode}")

    def events(self, kind: str, since_s: float = 0.0) -> list[Event]:
        """Events of one kind in its metrics file, from `since_s` (seconds since the epoch) on."""
        file = self._out / "metrics.jsonl"
        if not file.exists():
            return []
        with file.open(encoding="utf-8") as lines:
            found = [json.loads(line) for line in lines if line.endswith("\n") and f'"event": "{kind}"' in line]
        return [event for event in found if event["t"] >= since_s]

    def commits(self, since_s: float = 0.0) -> list[Event]:
        return [event for event in self.events("round", since_s) if event["status"] == "committed"]

    @property
    def peer_id(self) -> str:
        return str(self.events("start")[-1]["peer_id"])


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="p2ptrain-") as name, contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        for index in range(PEERS):
            found = ("--steps", "0", "--sync-every", str(SYNC_EVERY))
            flags = _through(peers[0]) if peers else found
            peers.append(Peer(Path(name) / str(index), *flags))
            stack.callback(peers[-1].close)
            _until(peers, peers[-1].addresses.exists)
        # At different times of an interval: between rounds, during a round, while it lands.
        measured = [_kill(peers, peers[kill % PEERS], kill / KILLS) for kill in range(KILLS)]
        _check_hashes(peers)
    late_s, back_s = zip(*measured, strict=True)
    return [
        _row("kill -9 of one of three: the others' next commit, after it was due", late_s, 5.0),
        _row("the killed peer, restarted: from its start into a committed round", back_s, 20.0),
    ]


def _kill(peers: list[Peer], victim: Peer, share: float) -> tuple[float, float]:
    """Kill a peer at a share of the interval, and restart it once the others have committed a round without it.

    Returns:
        Seconds by which the later commit of the two others was late, and seconds from the restart until the killed
        peer contributed to a committed round.
    """
    others = [peer for peer in peers if peer is not victim]
    interval_s = _settle(peers)
    due_s = peers[0].commits()[-1]["t"] + interval_s
    time.sleep(interval_s * share)
    killed_s = victim.kill()
    _until(others, lambda: all(peer.commits(killed_s) for peer in others))
    committed_s = max(peer.commits(killed_s)[0]["t"] for peer in others)
    victim.launch(*_through(others[0]))
    joined_s = _until(peers, lambda: _first_own_s(victim))
    return max(0.0, committed_s - max(due_s, killed_s)), joined_s - victim.started_s


def _through(peer: Peer) -> tuple[str, str]:
    return "--initial-peers", str(peer.addresses)


def _settle(peers: list[Peer]) -> float:
    """Wait for several rounds of all peers. Returns, just after one, their median distance in seconds."""
    began_s = time.time()

    def rounds() -> list[Event] | None:
        commits = [commit for commit in peers[0].commits(began_s) if commit["group_size"] == PEERS]
        return commits if len(commits) > SETTLED_ROUNDS else None

    times = [float(commit["t"]) for commit in _until(peers, rounds)]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _first_own_s(peer: Peer) -> float | None:
    """When the first round with this peer's contribution since its last start landed, in seconds since the epoch."""
    commits = peer.commits(peer.started_s)
    return next((float(commit["t"]) for commit in commits if peer.peer_id in commit["contributors"]), None)


def _check_hashes(peers: list[Peer]) -> None:
    """Raise WorkerError if two peers have different states after the same round."""
    states: dict[tuple[str, int], set[str]] = {}
    for peer in peers:
        for commit in peer.commits():
            states.setdefault((commit["lineage"], commit["round"]), set()).add(commit["state_hash"])
    if different := [key for key, hashes in states.items() if len(hashes) > 1]:
        raise WorkerError(f"peers committed different states: {different}")


def _until(peers: list[Peer], condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        for peer in peers:
            peer.check()
        if time.monotonic() > deadline:
            raise WorkerError(f"a condition was not met within {TIMEOUT_S:.0f} s")
        time.sleep(0.1)
    return value


def _row(work: str, seconds: Sequence[float], limit_s: float) -> Row:
    return limited_row(f"{work}; demo model paced to half a core a peer", seconds, limit_s)
