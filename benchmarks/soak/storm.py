"""A soak from start to end: peers start, train without faults, train with faults, and must agree after them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.environment import Environment
from benchmarks.soak.peers import Scene, SoakPeer
from benchmarks.soak.plan import CUT, Fault
from p2ptrain.demo.orchestrator import running_processes, start_bootstrap
from p2ptrain.monitor.run_audit import RoundView, RunAudit

POLL_S = 0.25
MEASURE_EVERY_S = 10.0
# From the first start until all peers train, on a busy machine.
START_S = 120.0
# After the storm all peers normally land a round within a minute; a soak has failed after this time.
TOGETHER_S = 180.0


class SoakError(RuntimeError):
    """A peer ended, or two disagreed on a round. The message includes the peer's last output."""


@dataclass
class Soak:
    """The record of a soak. Times are seconds since the epoch.

    Attributes:
        peers: the peers, with their measurements.
        run_audit: the rounds of all peers.
        calm_s, storm_s, over_s, end_s: when all peers trained, when the faults began and ended, and the end.
        done: the faults that struck, each with its time.
        step_s: seconds per step.
    """

    peers: list[SoakPeer]
    run_audit: RunAudit
    calm_s: float = 0.0
    storm_s: float = 0.0
    over_s: float = 0.0
    end_s: float = 0.0
    done: list[tuple[float, Fault]] = field(default_factory=list)
    step_s: float = 0.0

    @property
    def together(self) -> RoundView | None:
        """The first round committed after the storm that all peers have landed, so that they share a lineage."""
        names = {peer.name for peer in self.peers}
        later = (round_ for round_ in self.run_audit.committed if round_.t > self.over_s)
        return min((round_ for round_ in later if names <= round_.applied), key=lambda r: r.t, default=None)


def run_soak(
    out: Path, environment: Environment, faults: list[Fault], *, step_s: float, calm_s: float, storm_s: float,
    end_s: float, say: Callable[[str], None],
) -> Soak:  # fmt: skip
    """Run a soak; blocks until its end.

    Args:
        out: an empty directory.
        environment: places of the peers; determines their number.
        faults: the faults, in order of time.
        step_s: seconds per step.
        calm_s: seconds of training before the faults, for comparison.
        storm_s: seconds of the storm.
        end_s: seconds without faults after it; longer if not all peers have landed one round by then.
        say: prints a line of progress.

    Raises:
        SoakError: a peer ended by itself or did not start to train, or two peers disagreed on a round.
    """
    run_audit = RunAudit()
    with running_processes() as processes:
        home = environment.bootstrap
        addresses = start_bootstrap(out, processes, lambda: False, host_maddrs=home.host_maddrs, enter=home.enter)
        scene = Scene(out, addresses, processes, run_audit, step_s)
        soak = Soak([SoakPeer(i, place, scene) for i, place in enumerate(environment.peers)], run_audit, step_s=step_s)
        try:
            _conduct(soak, environment, faults, (calm_s, storm_s, end_s), say)
        finally:
            for peer in soak.peers:
                peer.end()
    for peer in soak.peers:
        peer.read()
    return soak


def _conduct(
    soak: Soak, environment: Environment, faults: list[Fault], lasts_s: tuple[float, float, float],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    began_s = time.time()
    while not all(peer.steps for peer in soak.peers):
        _look(soak)
        if time.time() - began_s > START_S:
            raise SoakError(f"not all peers trained within {START_S:.0f} s")
        time.sleep(POLL_S)
    soak.calm_s = time.time()
    soak.storm_s = soak.calm_s + lasts_s[0]
    soak.over_s = soak.storm_s + lasts_s[1]
    say(f"all {len(soak.peers)} train; the storm begins in {lasts_s[0]:.0f} s")
    storm = _Storm(soak, environment, faults, say)
    measured_s = 0.0
    while (elapsed_s := (now := time.time()) - soak.over_s) < TOGETHER_S:
        if elapsed_s > lasts_s[2] and soak.together:
            break
        storm.act(now)
        _look(soak, storm.down)
        if now - measured_s > MEASURE_EVERY_S:
            measured_s = now
            for peer in soak.peers:
                peer.measure()
        time.sleep(POLL_S)
    soak.end_s = time.time()


def _look(soak: Soak, down: frozenset[int] = frozenset()) -> None:
    """Read the peers' events. Raises SoakError if a peer has ended by itself, or two disagree on a round."""
    for peer in soak.peers:
        peer.read()
        if peer.process.exit_status is not None and peer.number not in down:
            output = "\n".join(peer.process.last_lines)
            raise SoakError(f"{peer.name} ended with status {peer.process.exit_status}:\n{output}")
    if soak.run_audit.disagreements:
        raise SoakError(soak.run_audit.disagreements[0])


class _Storm:
    """Starts and ends faults at their times. `down` are the peers without a process."""

    def __init__(self, soak: Soak, environment: Environment, faults: list[Fault], say: Callable[[str], None]) -> None:
        self._soak, self._environment, self._say = soak, environment, say
        self._waiting = list(faults)
        self._open: list[Fault] = []

    @property
    def down(self) -> frozenset[int]:
        return frozenset(peer for fault in self._open if fault.kind in ("kill", "replace") for peer in fault.peers)

    def act(self, now: float) -> None:
        elapsed_s = now - self._soak.storm_s
        while self._waiting and self._waiting[0].at_s <= elapsed_s:
            fault = self._waiting.pop(0)
            self._open.append(fault)
            self._soak.done.append((now, fault))
            self._begin(fault)
        for fault in [fault for fault in self._open if fault.at_s + fault.lasts_s <= elapsed_s]:
            if self._end(fault):
                self._open.remove(fault)

    def _begin(self, fault: Fault) -> None:
        struck = [self._soak.peers[number] for number in fault.peers]
        names = ", ".join(peer.name for peer in struck)
        self._say(f"{fault.at_s:6.0f} s  {fault.kind} {names} for {fault.lasts_s:.0f} s")
        match fault.kind:
            case "kill":
                struck[0].kill()
            case "pause":
                struck[0].pause()
            case "replace":
                struck[0].ask_to_leave()
            case _:
                self._environment.cut(fault.peers)

    def _end(self, fault: Fault) -> bool:
        """End a fault. Returns False if it must be tried again, as the process still runs."""
        peer = self._soak.peers[fault.peers[0]]
        if fault.kind == CUT:
            self._environment.heal(fault.peers)
        elif fault.kind == "pause":
            peer.resume()
        elif fault.kind == "kill":
            peer.restart()
        elif peer.process.exit_status is None:
            return False
        else:
            peer.replace()
        return True
