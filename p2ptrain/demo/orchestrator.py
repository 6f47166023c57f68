"""Run the peers of the demo: start them, kill one, add one, and wait for their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from p2ptrain.demo.directory import BOOTSTRAP, peer_directory
from p2ptrain.demo.display import Show
from p2ptrain.demo.plan import DemoPlan
from p2ptrain.demo.processes import EventReader, Process
from p2ptrain.errors import P2PTrainError
from p2ptrain.monitor.peerview import PeerState
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.training.join import METRICS_FILE

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
LOG = "log.txt"
ADDRESSES = "addresses"
IDENTITY = "identity.key"
REFRESH_S = 0.25
# A peer without new metrics for this long hangs. Waiting for a last round may take a minute.
SILENCE_S = 120.0


class DemoFailedError(P2PTrainError):
    """A process of the demo failed; the message ends with its last lines of output."""


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
    process = Process(
        [
            "bootstrap",
            "--identity",
            str(directory / IDENTITY),
            "--host-maddrs",
            host_maddrs,
            "--write-addresses",
            str(addresses),
        ],
        directory / LOG,
        enter=enter,
    )
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
        process = Process(
            [
                "join",
                *self._plan.run_flags,
                "--initial-peers",
                str(self._addresses),
                "--host-maddrs",
                LOOPBACK,
                "--out",
                str(directory),
                "--seed",
                str(self._plan.peer_seed(number)),
                "--threads",
                "1",
                "--device",
                "cpu",
                "--eval-every",
                str(self._plan.eval_every),
            ],
            directory / LOG,
        )
        self._processes.append(process)
        self._peers[number] = process
        self._readers[number] = EventReader(directory / METRICS_FILE)
        self._heard_s[number] = time.time()
        self._swarm.started(number, late=late)

    def _read_events(self) -> None:
        for number, reader in self._readers.items():
            for event in reader.new_events():
                self._heard_s[number] = time.time()
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
            # Without other peers it would start the run again.
            swarm.peers[swarm.late].state = PeerState.TOO_LATE
            self._peers[swarm.late].kill()

    def _has_enough_voters(self) -> bool:
        """Whether the last round's contributors, who vote on the next one, remain a quorum after a kill.

        Two of three are a quorum. So is one of two if its id is the smaller one, and the other one is killed.
        """
        last = self._swarm.rounds.applied[-1:]
        return any(min(len(round_.contributors), len(round_.applied)) >= min(3, self._plan.peers) for round_ in last)

    def _choose_victim(self) -> int:
        """The founder; of two peers the one with the larger id, because the smaller id breaks ties of two voters."""
        if self._plan.peers == 2:
            return max(self._swarm.up, key=lambda peer: peer.peer_id).number
        return next((peer.number for peer in self._swarm.up if peer.founded), self._plan.peers)

    def _check(self) -> None:
        """Raise DemoFailedError if a peer has failed or hangs."""
        for number, process in self._peers.items():
            peer = self._swarm.peers[number]
            if peer.was_killed:
                continue
            if process.exit_status not in (None, 0):
                raise _failure(peer.name, process)
            if process.exit_status is None and time.time() - self._heard_s[number] > SILENCE_S:
                raise _failure(f"{peer.name} (silent for {SILENCE_S:.0f} s)", process)


def _failure(name: str, process: Process) -> DemoFailedError:
    status = "still running" if process.exit_status is None else f"exit status {process.exit_status}"
    output = "\n".join(f"    {line}" for line in process.last_lines)
    return DemoFailedError(f"{name} failed ({status}); the last lines of {process.log}:\n{output}")
