"""Commands of p2ptrain as a user runs them: processes, terminals, what they print and record, and what they leave.

Everything is on 127.0.0.1. Nothing is timed: tests poll for what must come, up to a deadline that only a hang meets.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
Event = dict[str, Any]

# Only a hang lasts as long, on a busy machine too.
DEADLINE_S = 150.0
POLL_S = 0.05
# With three other busy programs on two cores, a peer at 10 would get a twentieth of a core.
ROOM = 5
CTRL_C = b"\x03"
# The terminal of a person, wherever the tests run: in CI, or where TERM=dumb, there is no live view.
TERMINAL = {"TERM": "xterm-256color"}
NOT_A_PERSONS = ("CI", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
# What moves a terminal's cursor, or colours what is on it.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _as_from_a_shell() -> None:
    """Hold the terminal, and heed Ctrl-C even if the tests themselves run in the background, where it is ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """One command, with files for what it prints and records, and a directory of its own for its sockets.

    Attributes:
        command: as typed.
        directory: where it runs.
        addresses: the file into which a peer writes its own, once it can be joined.
        killed: whether it had no chance to clean up.
        refused: whether it was to fail.
    """

    def __init__(
        self, command: str, *, directory: Path, files: Path, sockets: Path, terminal: bool,
        settings: Mapping[str, Any], enter: Sequence[str],
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            command: its first word is looked up beside the Python that runs the tests.
            directory: where to run it.
            files: path and stem of the files that it writes.
            sockets: its TMPDIR; the path of a socket must be short.
            terminal: whether it is in the foreground of a terminal of its own, into which `press` types.
            settings: given as P2PTRAIN_… in its environment.
            enter: what is put before the command, which it becomes: to run it on another machine.
        """
        self.command, self.directory = command, directory
        self.addresses = files.with_suffix(".addresses")
        self.killed = self.refused = False
        self._files = [files.with_suffix(end) for end in (".out", ".err", ".jsonl")]
        self._output, self._errors, self._metrics = self._files
        self._sockets = sockets
        self._events: list[Event] = []
        self._events_size = 0
        self._makes_room = False
        self._reader: threading.Thread | None = None
        directory.mkdir(exist_ok=True)
        sockets.mkdir()
        settings = {
            "host_maddrs": "/ip4/127.0.0.1/tcp/0", "threads": 1, "device": "cpu",
            "write_addresses": self.addresses, "metrics": self._metrics, **settings,
        }  # fmt: skip
        environ = {name: value for name, value in os.environ.items() if not name.startswith("P2PTRAIN_")}
        environ |= {f"P2PTRAIN_{name.upper()}": str(value) for name, value in settings.items()}
        environ |= {"TMPDIR": str(sockets), "OMP_NUM_THREADS": "1"}
        words = shlex.split(command)
        words[0] = str(Path(sys.executable).parent / words[0])
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            if terminal:
                environ = {name: value for name, value in environ.items() if name not in NOT_A_PERSONS} | TERMINAL
                self._keyboard, screen = pty.openpty()
                streams = {"stdin": screen, "stdout": screen, "stderr": screen, "start_new_session": True}
                streams["preexec_fn"] = _as_from_a_shell
            self._process = subprocess.Popen([*enter, *words], cwd=directory, env=environ, **streams)
            if terminal:
                os.close(screen)
                self._reader = threading.Thread(target=self._read_screen, daemon=True)
                self._reader.start()

    # --- what is done to it -------------------------------------------------------------------------------------

    def press(self, keys: bytes) -> None:
        """Type into the terminal; Ctrl-C interrupts the whole process group."""
        os.write(self._keyboard, keys)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """kill -9."""
        self.killed = True
        self._process.kill()

    def pause(self, *, with_daemon: bool) -> None:
        """SIGSTOP: nothing of it runs until `wake`; its p2pd goes on unless that is stopped too."""
        for process in [psutil.Process(self._process.pid), *(self.daemons if with_daemon else [])]:
            process.suspend()

    def wake(self) -> None:
        """SIGCONT."""
        for process in [*self.daemons, psutil.Process(self._process.pid)]:
            process.resume()

    def make_room(self) -> None:
        """Lower the priority of its training thread once it trains: on two cores others would hardly get started."""
        if not self._makes_room and self.running and self.events("step"):
            with contextlib.suppress(psutil.Error):
                psutil.Process(self._process.pid).nice(ROOM)
            self._makes_room = True

    def kill_daemon(self) -> None:
        """kill -9 of its p2pd."""
        (daemon,) = self.daemons
        daemon.kill()

    def wait(self) -> int:
        """The exit status, once all that it printed is here. Raises TimeoutExpired when it neither ends nor goes on."""
        written = -1
        while True:
            try:
                status = self._process.wait(DEADLINE_S)
                break
            except subprocess.TimeoutExpired:
                # A peer that trains on a busy machine goes on to write, and ends at last.
                before, written = written, sum(file.stat().st_size for file in self._files if file.exists())
                if written == before:
                    raise
        if self._reader is not None:
            self._reader.join(DEADLINE_S)
        return status

    # --- what it shows ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def failed(self) -> bool:
        return not (self.running or self.killed or self.refused) and self.wait() != 0

    @property
    def output(self) -> str:
        """What it has printed; in a terminal errors and logs too."""
        return self._output.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")

    @property
    def shown(self) -> str:
        """What it has printed, without what moves a cursor or colours."""
        return CONTROL.sub("", self.output)

    @property
    def typed_out(self) -> bytes:
        """All that its terminal was sent, as it is."""
        return self._output.read_bytes()

    @property
    def errors(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")

    @property
    def join_line(self) -> str:
        """The line that it prints for others to paste; empty as long as it has not."""
        lines = self.shown.splitlines(keepends=True)
        # A live view has it once more, in pieces where the terminal is narrow.
        whole = [line for line in lines if line.startswith("p2ptrain join ") and not line.rstrip().endswith("\\")]
        return whole[0].strip() if whole and whole[0].endswith("\n") else ""

    def events(self, kind: str) -> list[Event]:
        """Its metrics so far: the events of a kind."""
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                file.seek(self._events_size)
                whole_lines = file.read().rpartition(b"\n")
            self._events += [json.loads(line) for line in whole_lines[0].splitlines()]
            self._events_size += len(whole_lines[0]) + len(whole_lines[1])
        return [event for event in self._events if event["event"] == kind]

    def rounds(self, since: int = 0, *, by: int = 1) -> list[Event]:
        """Rounds that landed here, numbered `since` or higher, with at least `by` contributors."""
        return [event for event in self.events("round") if event["round"] >= since and event["group_size"] >= by]

    @property
    def peer_id(self) -> str:
        return str(self.events("start")[0]["peer_id"])

    @property
    def remembered(self) -> bool:
        """Whether it has noted whom it trains with, for after a restart."""
        return bool([*self.directory.glob("p2ptrain-*/peers.txt")])

    @property
    def daemons(self) -> list[psutil.Process]:
        """Its p2pd."""
        return [child for child in psutil.Process(self._process.pid).children() if child.name() == "p2pd"]

    def leftovers(self) -> list[str]:
        """What is still there of it after its end: sockets, unless it was killed, and processes that it started."""
        sockets = [] if self.killed else [*self._sockets.glob("p2ptrain-*"), *self._sockets.glob("hivemind-*")]
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self._sockets) and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return [str(leftover) for leftover in (*sockets, *processes)]

    def _read_screen(self) -> None:
        """Keep what appears on the terminal: a process stops when its terminal is not read."""
        with self._output.open("ab") as output, contextlib.suppress(OSError), open(self._keyboard, "rb", 0) as screen:
            while shown := screen.read(65536):
                output.write(shown)
                output.flush()


class Swarm:
    """All processes of one test.

    Args:
        directory: for their files.
        sockets: a directory with a short path.
    """

    def __init__(self, directory: Path, sockets: Path) -> None:
        self.processes: list[Process] = []
        self._directory, self._sockets = directory, sockets

    def start(
        self,
        command: str,
        *,
        directory: Path | None = None,
        terminal: bool = False,
        settings: Mapping[str, Any] = MappingProxyType({}),
        enter: Sequence[str] = (),
    ) -> Process:
        """Start a command, as `Process` says; in a directory of its own unless one is given."""
        number = len(self.processes)
        process = Process(
            command, directory=directory or self._directory / f"at-{number}", files=self._directory / f"{number}",
            sockets=self._sockets / f"{number}", terminal=terminal, settings=settings,
            enter=enter,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def until(self, condition: Callable[[], T]) -> T:
        """Poll until the condition is true, and return its value. A process that fails ends the waiting."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            value = condition()
            # Also the last time: of two that train, one with a tenth of the other's share would take ten times as long.
            for process in self.processes:
                process.make_room()
            if value:
                return value
            assert not any(process.failed for process in self.processes), self.report()
            assert time.monotonic() < deadline, self.report()
            time.sleep(POLL_S)

    def until_ready(self, *processes: Process) -> None:
        """Wait until these can be joined."""
        self.until(lambda: all(process.addresses.exists() for process in processes))

    def refusal(self, command: str, status: int = 2) -> str:
        """Run a command that must refuse to go on: exit status 2, or `status`, and one line, which is returned.

        Before that, a joiner may have said its id, and any command what it waits for.
        """
        process = self.start(command)
        process.refused = True
        assert process.wait() == status, self.report()
        said = ("this peer's id is ", "connecting to the initial peers; ", "asking the peers of run ")
        (line,) = (line for line in process.errors.splitlines() if not line.startswith(said))
        assert line.startswith("p2ptrain: error: ")
        return line

    def close(self) -> None:
        """End what still runs, the polite way; nothing may be left of anything."""
        running = [process for process in self.processes if process.running]
        for process in running:
            process.wake()  # a test that failed may have left it stopped
            process.terminate()
        try:
            statuses = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        assert not any(statuses), self.report()
        leftovers = [leftover for process in self.processes for leftover in process.leftovers()]
        assert leftovers == []

    def report(self) -> str:
        """The last lines of every process, for the message of a failure."""
        parts = []
        for process in self.processes:
            status = "running" if process.running else f"exit status {process.wait()}"
            last_lines = [*process.output.splitlines()[-8:], *process.errors.splitlines()[-20:]]
            parts.append("\n    ".join([f"{process.command} ({status})", *last_lines]))
        return "\n".join(["", *parts])


def assert_anchors_agree(*processes: Process) -> None:
    """No two of them stand on different anchors after the same round of the same lineage."""
    anchors: dict[tuple[str, int], set[str]] = {}
    for process in processes:
        for event in process.rounds():
            anchors.setdefault((event["lineage"], event["round"]), set()).add(event["anchor_hash"])
    assert anchors
    assert all(len(hashes) == 1 for hashes in anchors.values()), anchors
