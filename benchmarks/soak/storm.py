"""A soak from beginning to end: peers start, train in calm, come through a storm, and in calm again agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.peers import SoakPeer
from benchmarks.soak.plan import Fault
from p2ptrain.demo.conductor import start_bootstrap
from p2ptrain.demo.processes import running_processes
from p2ptrain.monitor.account import Account

POLL_S = 0.25
MEASURE_EVERY_S = 10.0
# From the first start to the first step of all; a busy machine takes its time.
START_S = 120.0


class SoakError(RuntimeError):
    """A peer did what none may do; the message ends in what it said last."""


@dataclass
class Soak:
    """What happened. Times are seconds since the epoch.

    Attributes:
        calm_s, storm_s, over_s, end_s: when all trained, when the faults began, when they were over, and the end.
        done: faults that were done, with the time of each.
    """

    peers: list[SoakPeer]
    account: Account
    calm_s: float = 0.0
    storm_s: float = 0.0
    over_s: float = 0.0
    end_s: float = 0.0
    done: list[tuple[float, Fault]] = field(default_factory=list)


def run_soak(
    out: Path, peers: int, faults: list[Fault], *, calm_s: float, storm_s: float, end_s: float,
    say: Callable[[str], None],
) -> Soak:  # fmt: skip
    """Run all of it.

    Args:
        out: an empty directory.
        peers: how many train at once.
        faults: what is done in the storm, in order.
        calm_s: seconds of training before the storm, by which what it costs is measured.
        storm_s: seconds of the storm.
        end_s: seconds without faults after it.
        say: told what is done.

    Raises SoakError.
    """
    account = Account()
    with running_processes() as processes:
        addresses = start_bootstrap(out, processes, lambda: False)
        soak = Soak([SoakPeer(i, out, addresses, processes, account) for i in range(peers)], account)
        try:
            _conduct(soak, faults, (calm_s, storm_s, end_s), say)
        finally:
            for peer in soak.peers:
                peer.end()
    for peer in soak.peers:
        peer.read()
    return soak


def _conduct(soak: Soak, faults: list[Fault], lasts_s: tuple[float, float, float], say: Callable[[str], None]) -> None:
    began_s = time.time()
    while not all(peer.steps for peer in soak.peers):
        _look(soak)
        if time.time() - began_s > START_S:
            raise SoakError(f"not all peers trained within {START_S:.0f} s")
        time.sleep(POLL_S)
    soak.calm_s = time.time()
    soak.storm_s = soak.calm_s + lasts_s[0]
    soak.over_s = soak.storm_s + lasts_s[1]
    soak.end_s = soak.over_s + lasts_s[2]
    say(f"all {len(soak.peers)} train; the storm begins in {lasts_s[0]:.0f} s")
    storm = _Storm(soak, faults, say)
    measured_s = 0.0
    while (now := time.time()) < soak.end_s:
        storm.act(now)
        _look(soak, storm.down)
        if now - measured_s > MEASURE_EVERY_S:
            measured_s = now
            for peer in soak.peers:
                peer.measure()
        time.sleep(POLL_S)


def _look(soak: Soak, down: frozenset[int] = frozenset()) -> None:
    """Read what the peers record. Raises SoakError when one has ended by itself, or the promise is broken."""
    for peer in soak.peers:
        peer.read()
        if peer.process.exit_status is not None and peer.number not in down:
            said = "\n".join(peer.process.last_lines)
            raise SoakError(f"{peer.name} ended with status {peer.process.exit_status}:\n{said}")
    if soak.account.disagreements:
        raise SoakError(soak.account.disagreements[0])


class _Storm:
    """Does and undoes faults as their times come. `down` are the peers that have no process for now."""

    def __init__(self, soak: Soak, faults: list[Fault], say: Callable[[str], None]) -> None:
        self._soak, self._say = soak, say
        self._waiting = list(faults)
        self._open: list[Fault] = []

    @property
    def down(self) -> frozenset[int]:
        return frozenset(fault.peer for fault in self._open if fault.kind != "pause")

    def act(self, now: float) -> None:
        elapsed_s = now - self._soak.storm_s
        while self._waiting and self._waiting[0].at_s <= elapsed_s:
            fault = self._waiting.pop(0)
            self._open.append(fault)
            self._soak.done.append((now, fault))
            self._begin(self._soak.peers[fault.peer], fault)
        for fault in [fault for fault in self._open if fault.at_s + fault.lasts_s <= elapsed_s]:
            if self._end(self._soak.peers[fault.peer], fault):
                self._open.remove(fault)

    def _begin(self, peer: SoakPeer, fault: Fault) -> None:
        self._say(f"{fault.at_s:6.0f} s  {fault.kind} {peer.name} for {fault.lasts_s:.0f} s")
        match fault.kind:
            case "kill":
                peer.kill()
            case "pause":
                peer.pause()
            case _:
                peer.ask_to_leave()

    @staticmethod
    def _end(peer: SoakPeer, fault: Fault) -> bool:
        """Undo a fault; False while that cannot be done yet."""
        if fault.kind == "pause":
            peer.resume()
        elif fault.kind == "kill":
            peer.restart()
        elif peer.process.exit_status is None:
            return False
        else:
            peer.replace()
        return True
