"""The demo's processes, which all end with the demo, however it ends; and their metrics files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from p2ptrain.network.leftovers import killed_with_us, remove_leftovers
from p2ptrain.protocol.event_log.events import Event
from p2ptrain.settings.setting import ENV_PREFIX

# A peer leaves within 10 s of a SIGTERM (measured: below 2 s on a busy machine).
LEAVE_S = 12.0
LAST_LINES = 15


class Process:
    """A `p2ptrain` command that runs in the background, with its output in a file.

    `enter` is a command prefix that executes the rest, for example in a network namespace.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, enter: Sequence[str] = ()) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            # A separate session: Ctrl-C in the terminal reaches only us, and we stop the processes.
            self._popen = subprocess.Popen(
                [*enter, *_command(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._popen.poll()

    @property
    def last_lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def ask_to_leave(self) -> None:
        """Ask it to end (SIGTERM, which acts as Ctrl-C)."""
        if self.exit_status is None:
            self._popen.send_signal(signal.SIGTERM)


class EventReader:
    """Reads a peer's metrics file while the peer writes it; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_events(self) -> Iterator[Event]:
        """The events since the last call. An incomplete last line is left for the next call.

        A line that is not an event is skipped.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


@contextmanager
def running_processes() -> Iterator[list[Process]]:
    """Yield a list for processes; at the end of the block all of them are asked to leave, then killed."""
    processes: list[Process] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.ask_to_leave()
        deadline_s = time.monotonic() + LEAVE_S
        while any(process.exit_status is None for process in processes) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for process in processes:
            process.kill()
        remove_leftovers()


def _command(arguments: Sequence[str]) -> list[str]:
    return killed_with_us([sys.executable, "-m", "p2ptrain", *arguments])


def _environment() -> dict[str, str]:
    """Our environment without P2PTRAIN_ variables, so that the user's settings do not change the demo."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
