"""The peers of a soak: real `p2ptrain join` processes, the faults that strike them, and their metrics and resources."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measure import cpu_s, memory
from benchmarks.processes import descendants
from benchmarks.soak.environment import Place
from benchmarks.soak.time_use import (
    DOWN,
    DOWNLOADING,
    EVALUATION,
    FINDING,
    FIRST_STEP,
    IMPORTING,
    JOINING,
    OPENING,
    STEP,
    Entry,
)
from p2ptrain.demo.orchestrator import IDENTITY, LOG, EventReader, Process
from p2ptrain.monitor.run_audit import RunAudit
from p2ptrain.protocol.event_log.events import Event
from p2ptrain.training.checkpoint import MANIFEST
from p2ptrain.training.join import METRICS_FILE

# Files that a peer writes at each start: when everything is imported, if it is missing; when its network is open.
LOCK, PORTS = ".lock", f"{IDENTITY}.ports"
# At the requested pace.
ROUND_EVERY_S = 12.0


def run_flags(step_s: float) -> list[str]:
    """The flags of `p2ptrain join` for all peers of a soak; `step_s`: seconds per step."""
    sync_every = max(1, round(ROUND_EVERY_S / step_s))
    return [
        "--run-id", "soak", "--model", "benchmarks.paced:evenly", "--steps", "0", "--fragment-fraction", "0.02",
        "--sync-every", str(sync_every),
        # An evaluation takes as long as six steps. One checkpoint a minute, so that restarts find one.
        "--eval-every", str(2 * sync_every), "--checkpoint-minutes", "1", "--threads", "1", "--device", "cpu",
    ]  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """Resources of one peer and its daemon at time `t`; `disk_bytes` without its log, metrics and manifests.

    A manifest has the history of up to 256 rounds, which takes an hour to fill: a third of such a small checkpoint.
    """

    t: float
    resident_bytes: int
    files: int
    threads: int
    disk_bytes: int


@dataclass(frozen=True)
class Scene:
    """What the peers of a soak share.

    Attributes:
        out: parent of the peers' directories.
        addresses: file with the addresses of the bootstrap node.
        processes: all started processes, to end them with the soak.
        run_audit: receives the events of all peers.
        step_s: seconds per step.
    """

    out: Path
    addresses: Path
    processes: list[Process]
    run_audit: RunAudit
    step_s: float


class SoakPeer:
    """One of the peers of a soak; `replace` puts a new peer in its place. `name` is that of the current directory."""

    def __init__(self, number: int, place: Place, scene: Scene) -> None:
        self.number = number
        self.pauses: list[tuple[float, float]] = []
        self.diary: list[Entry] = []
        self.blocked_s = 0.0
        self.steps: list[float] = []
        self.usage: list[Usage] = []
        self.used_cpu_s = 0.0
        self._place, self._scene = place, scene
        self._generation = 0
        self._paused_s = 0.0
        self._move_in()

    # --- faults -------------------------------------------------------------------------------------------------

    def _move_in(self) -> None:
        self.directory = self._scene.out / self.name
        self._reader = EventReader(self.directory / METRICS_FILE)
        self.restart()

    def restart(self) -> None:
        """Start the peer in its directory; after the first time with the same identity and its last checkpoint."""
        (self.directory / LOCK).unlink(missing_ok=True)
        self.process = Process(
            ["join", *run_flags(self._scene.step_s), "--initial-peers", str(self._scene.addresses),
             "--host-maddrs", self._place.host_maddrs, "--out", str(self.directory),
             "--seed", str(100 * self.number + self._generation)],
            self.directory / LOG, enter=self._place.enter,
        )  # fmt: skip
        self._scene.processes.append(self.process)
        self._started_s = time.time()
        self._has_step = False
        self._note(self._started_s, IMPORTING)

    def kill(self) -> None:
        """Send SIGKILL; its daemon ends too."""
        self._note_cpu()
        self._note(time.time(), DOWN)
        self.process.kill()

    def ask_to_leave(self) -> None:
        """Send SIGTERM, on which it leaves as on Ctrl-C."""
        self._note_cpu()
        self._note(time.time(), DOWN)
        self.process.ask_to_leave()

    def replace(self) -> None:
        """Start a new peer in its place, with a directory of its own."""
        self.read()
        self._generation += 1
        self._move_in()

    def pause(self) -> None:
        """Stop its processes with SIGSTOP, as when a laptop is closed."""
        self._paused_s = time.time()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        if self._paused_s:
            self.pauses.append((self._paused_s, time.time()))
            self._paused_s = 0.0

    def _signal(self, number: signal.Signals) -> None:
        for process in descendants(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    # --- measurements -------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return f"peer-{self.number}" + (f"-{self._generation}" if self._generation else "")

    @property
    def paused(self) -> bool:
        return self._paused_s > 0

    @property
    def trains(self) -> bool:
        """Whether its process runs and is not paused."""
        return self.process.exit_status is None and not self.paused

    def read(self) -> None:
        """Read the events that it has recorded since the last call."""
        for event in self._reader.new_events():
            if event["event"] == "start":
                # This event comes after torch's import, but a join is measured from the start of the process.
                event["built_s"], event["t"] = event["t"], self._started_s
            self._scene.run_audit.note(self.name, event)
            if event["event"] == "step":
                self._has_step = True
                self.steps.append(event["t"])
                blocked_s = self._blocked(event)
                self.blocked_s += blocked_s
                self._note(event["t"], STEP, blocked_s)
            elif event["event"] == "eval" and self._has_step:
                self._note(event["t"], EVALUATION)
            elif not self._has_step:
                self._note_start(event)

    def _note_start(self, event: Event) -> None:
        """Note how far its start has come. Between its process and its first event it writes two files."""
        match event:
            case {"event": "start"}:
                for file, use in ((LOCK, OPENING), (PORTS, FINDING)):
                    self._note((self.directory / file).stat().st_mtime, use)
                self._note(event["built_s"], JOINING)
            case {"event": "status", "status": str(status)} if status.startswith("downloading"):
                self._note(event["t"], DOWNLOADING)
            case {"event": "adopt"}:
                self._note(event["t"], FIRST_STEP)

    def _note(self, t: float, what: str, seconds: float = 0.0) -> None:
        self.diary.append((t, what, seconds))

    def _blocked(self, step: Event) -> float:
        """Seconds that an exchange blocked training, without those in which the peer was paused."""
        end, held_s = float(step["t"]), float(step["exchange_s"])
        asleep = sum(max(0.0, min(end, woke) - max(end - held_s, slept)) for slept, woke in self.pauses)
        return max(0.0, held_s - asleep)

    def measure(self) -> None:
        """Record its current use of resources."""
        if not self.trains:
            return
        with contextlib.suppress(psutil.Error, OSError):
            family = descendants(self.process.pid)
            self.usage.append(
                Usage(
                    time.time(),
                    memory(self.process.pid).resident,
                    sum(process.num_fds() for process in family),
                    sum(process.num_threads() for process in family),
                    _disk_bytes(self.directory),
                )
            )

    def _note_cpu(self) -> None:
        self.used_cpu_s += cpu_s([self.process.pid])

    def end(self) -> None:
        """Resume it, so that it can be asked to leave, and read its CPU time."""
        self._note_cpu()
        self.resume()


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            if name not in (METRICS_FILE, LOG, MANIFEST):
                with contextlib.suppress(FileNotFoundError):  # an old checkpoint was removed
                    total += os.path.getsize(os.path.join(path, name))
    return total
