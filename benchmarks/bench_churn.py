"""One of three peers is killed (kill -9): how long the others' next round takes, and the way back of the killed one."""

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
from benchmarks.results import Row, limited_row

T = TypeVar("T")
Event = dict[str, Any]

PEERS = 3
# Each peer is killed twice, the founder among them.
KILLS = 6
# Inner steps between rounds: some three seconds of the paced demo model on two cores.
SYNC_EVERY = 200
# Rounds from whose distance it is told when the next one is due.
SETTLED_ROUNDS = 4
TIMEOUT_S = 120.0


class Peer:
    """`p2ptrain join` in a directory of its own, to which it comes back after each kill."""

    def __init__(self, out: Path, *flags: str) -> None:
        self.addresses = out / "addresses"
        self._out = out
        self.launch(*flags)

    def launch(self, *flags: str) -> None:
        """Start it, or start it again."""
        arguments = ["join", "--out", str(self._out), "--model", "benchmarks.paced:half_a_core", "--threads", "1"]
        arguments += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--write-addresses", str(self.addresses), *flags]
        command = [sys.executable, "-c", "from p2ptrain.cli.main import main; main()", *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.started_s = time.time()
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, start_new_session=True
        )

    def kill(self) -> float:
        """kill -9, and when, in seconds since the epoch."""
        self._process.kill()
        killed_s = time.time()
        self._process.wait()
        return killed_s

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20.0)
        for left in descendants(self._process.pid):
            left.kill()
        self._process.wait()

    def check(self) -> None:
        if self._process.poll() is not None:
            raise WorkerError(f"p2ptrain join ended with status {self._process.returncode}")

    def events(self, kind: str, since_s: float = 0.0) -> list[Event]:
        """Its metrics since a time: the events of a kind."""
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
        # At all moments of an interval: at rest, in a round, while it lands.
        measured = [_kill(peers, peers[kill % PEERS], kill / KILLS) for kill in range(KILLS)]
        _check_hashes(peers)
    late_s, back_s = zip(*measured, strict=True)
    return [
        _row("kill -9 of one of three: the others' next commit, after it was due", late_s, 5.0),
        _row("the killed peer, relaunched: from its start into a committed round", back_s, 20.0),
    ]


def _kill(peers: list[Peer], victim: Peer, share: float) -> tuple[float, float]:
    """Kill a peer at a share of the interval, and start it again once the others have committed without it.

    Returns:
        Seconds by which the later of the others' commits was late, and until the victim had a part in a round.
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
    """Wait for some rounds of everybody in a row. Returns their usual distance in seconds, just after one."""
    began_s = time.time()

    def rounds() -> list[Event]:
        commits = peers[0].commits(began_s)
        return [commit for commit in commits if commit["group_size"] == PEERS]

    seen = _until(peers, lambda: len(rounds()) > SETTLED_ROUNDS and rounds())
    times = [commit["t"] for commit in seen]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _first_own_s(peer: Peer) -> float | None:
    """When the first round landed that a peer had a part in since its last start, in seconds since the epoch."""
    commits = peer.commits(peer.started_s)
    return next((float(commit["t"]) for commit in commits if peer.peer_id in commit["contributors"]), None)


def _check_hashes(peers: list[Peer]) -> None:
    """Raises WorkerError when two peers landed different states after one round."""
    states: dict[tuple[str, int], set[str]] = {}
    for peer in peers:
        for commit in peer.commits():
            states.setdefault((commit["lineage"], commit["round"]), set()).add(commit["state_sha256"])
    if different := [key for key, hashes in states.items() if len(hashes) > 1]:
        raise WorkerError(f"peers committed different states: {different}")


def _until(peers: list[Peer], condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        for peer in peers:
            peer.check()
        if time.monotonic() > deadline:
            raise WorkerError("what was waited for did not happen in time")
        time.sleep(0.1)
    return value


def _row(work: str, seconds: Sequence[float], limit_s: float) -> Row:
    return limited_row(f"{work}; demo model paced to half a core a peer", seconds, limit_s)
