"""The processes of the demo: starts them, kills a peer, adds one, waits. All end with the demo, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from p2ptrain.demo.display import Show
from p2ptrain.demo.plan import DemoPlan, as_flags
from p2ptrain.errors import P2PTrainError
from p2ptrain.monitor.peerview import PeerState
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.network.process_lifetime import killed_with_us, remove_leftovers
from p2ptrain.protocol.event_log.events import Event
from p2ptrain.settings.setting import ENV_PREFIX
from p2ptrain.training.join import METRICS_FILE

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
BOOTSTRAP = "bootstrap"
LOG = "log.txt"
ADDRESSES = "addresses"
IDENTITY = "identity.key"
REFRESH_S = 0.25
# A peer without new metrics for this long hangs, also while it waits for the run's last round: seconds on loopback.
SILENCE_S = 120.0
# A peer leaves within 10 s of a SIGTERM (measured: below 2 s on a busy machine).
LEAVE_S = 12.0
LAST_LINES = 15


class DemoFailedError(P2PTrainError):
    """A process of the demo failed; the message ends with its last lines of output."""


class Process:
    """A `p2ptrain` command that runs in the background, with its output in a file.

    `enter` is a command prefix that executes the rest, for example in a network namespace.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, enter: Sequence[str] = ()) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        command = [*enter, *killed_with_us([sys.executable, "-m", "p2ptrain", *arguments])]
        # Without P2PTRAIN_ variables, so that the user's settings do not change the demo.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        env = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as out:
            # In a session of its own: Ctrl-C in the terminal reaches only the demo, which then stops its processes.
            none = subprocess.DEVNULL
            self._popen = subprocess.Popen(command, stdin=none, stdout=out, stderr=out, env=env, start_new_session=True)
        self.pid = self._popen.pid

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


def peer_directory(out: Path, number: int) -> Path:
    return out / f"peer-{number}"


def start_bootstrap(
    out: Path,
    processes: list[Process],
    stop: Callable[[], bool],
    *,
    host_maddrs: str = LOOPBACK,
    enter: Sequence[str] = (),
) -> Path:
    """Start the bootstrap node of the peers, and wait for its address file.

    It does not train, so that any peer may be killed and later peers can still join.
    """
    directory = out / BOOTSTRAP
    addresses = directory / ADDRESSES
    flags = as_flags({"identity": directory / IDENTITY, "host-maddrs": host_maddrs, "write-addresses": addresses})
    process = Process(["bootstrap", *flags], directory / LOG, enter=enter)
    processes.append(process)
    while not addresses.exists():
        if stop():
            raise KeyboardInterrupt
        if process.exit_status is not None:
            raise _failure("the bootstrap node", process)
        time.sleep(0.05)
    return addresses


class Orchestrator:
    """Owns the peers' processes and updates the view of the swarm, from the first start to the last exit."""

    def __init__(self, plan: DemoPlan, out: Path, addresses: Path, processes: list[Process], swarm: SwarmView) -> None:
        self._plan = plan
        self._out = out
        self._addresses = addresses
        self._processes = processes
        self._swarm = swarm
        self._peers: dict[int, Process] = {}
        self._readers: dict[int, EventReader] = {}
        self._heard_s: dict[int, float] = {}

    def run(self, show: Show, stop: Callable[[], bool]) -> None:
        """Run until all peers have ended.

        Raises:
            DemoFailedError: a peer failed or went silent.
            KeyboardInterrupt: `stop` returned True.
        """
        for number in range(1, self._plan.peers + 1):
            self._start(number)
        while any(process.exit_status is None for process in self._peers.values()):
            self._read_events()
            self._act()
            show(self._swarm)
            self._check()
            if stop():
                raise KeyboardInterrupt
            time.sleep(REFRESH_S)
        self._read_events()
        show(self._swarm)
        self._check()

    def _start(self, number: int, *, late: bool = False) -> None:
        directory = peer_directory(self._out, number)
        seed, eval_every = self._plan.peer_seed(number), self._plan.eval_every
        where = {"initial-peers": self._addresses, "host-maddrs": LOOPBACK, "out": directory}
        how = {"seed": seed, "threads": 1, "device": "cpu", "eval-every": eval_every}
        process = Process(["join", *self._plan.run_flags, *as_flags({**where, **how})], directory / LOG)
        self._processes.append(process)
        self._peers[number] = process
        self._readers[number] = EventReader(directory / METRICS_FILE)
        self._heard_s[number] = time.monotonic()
        self._swarm.started(number, late=late)

    def _read_events(self) -> None:
        for number, reader in self._readers.items():
            for event in reader.new_events():
                self._heard_s[number] = time.monotonic()
                self._swarm.apply(number, event)

    def _act(self) -> None:
        swarm = self._swarm
        is_due = swarm.step >= self._plan.kill_at_step and len(swarm.up) == self._plan.peers
        if swarm.killed_at is None and is_due and self._has_enough_voters():
            victim, now_s = self._choose_victim(), time.time()
            self._peers[victim].kill()
            swarm.killed(victim, now_s)
        if swarm.late is None and swarm.killed_at is not None and swarm.step >= self._plan.join_at_step:
            self._start(self._plan.peers + 1, late=True)
            swarm.add_notice(time.time(), f"peer {swarm.late} started; it knows only the address of the bootstrap node")
        others = [process for number, process in self._peers.items() if number != swarm.late]
        if swarm.late and not swarm.joined_at and all(process.exit_status is not None for process in others):
            # Alone, it would start the run again.
            swarm.peers[swarm.late].state = PeerState.TOO_LATE
            self._peers[swarm.late].kill()

    def _has_enough_voters(self) -> bool:
        """Whether the last round's contributors, who vote on the next one, remain a quorum after a kill.

        Two of three are a quorum. So is the first of two, the founder.
        """
        last = self._swarm.rounds.applied[-1:]
        return any(min(len(round_.contributors), len(round_.applied)) >= min(3, self._plan.peers) for round_ in last)

    def _choose_victim(self) -> int:
        """The founder; of two peers the other one, as the founder is the first voter, and a quorum alone."""
        founder = next((peer.number for peer in self._swarm.up if peer.founded), self._plan.peers)
        if self._plan.peers == 2:
            return next(peer.number for peer in self._swarm.up if peer.number != founder)
        return founder

    def _check(self) -> None:
        """Raise DemoFailedError if a peer has failed or hangs."""
        for number, process in self._peers.items():
            peer = self._swarm.peers[number]
            if peer.was_killed:
                continue
            if process.exit_status not in (None, 0):
                raise _failure(peer.name, process)
            if process.exit_status is None and time.monotonic() - self._heard_s[number] > SILENCE_S:
                raise _failure(f"{peer.name} (silent for {SILENCE_S:.0f} s)", process)


def _failure(name: str, process: Process) -> DemoFailedError:
    status = "still running" if process.exit_status is None else f"exit status {process.exit_status}"
    output = "\n".join(f"    {line}" for line in process.last_lines)
    return DemoFailedError(f"{name} failed ({status}); the last lines of {process.log}:\n{output}")
