"""A soak from beginning to end: peers start, train in calm, come through a storm, and in calm again agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.environment import Ground
from benchmarks.soak.peers import Scene, SoakPeer
from benchmarks.soak.plan import CUT, Fault
from p2ptrain.demo.orchestrator import start_bootstrap
from p2ptrain.demo.processes import running_processes
from p2ptrain.monitor.roundview import RoundView
from p2ptrain.monitor.run_audit import RunAudit

POLL_S = 0.25
MEASURE_EVERY_S = 10.0
# From the first start to the first step of all; a busy machine takes its time.
START_S = 120.0
# After the storm all land a round within the minute; a soak that fails says so after so long.
TOGETHER_S = 180.0


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
    run_audit: RunAudit
    calm_s: float = 0.0
    storm_s: float = 0.0
    over_s: float = 0.0
    end_s: float = 0.0
    done: list[tuple[float, Fault]] = field(default_factory=list)

    @property
    def together(self) -> RoundView | None:
        """The first round that was committed after the storm and landed by all peers; so all are in its lineage."""
        names = {peer.name for peer in self.peers}
        later = (round_ for round_ in self.run_audit.committed if round_.t > self.over_s)
        return min((round_ for round_ in later if names <= round_.states.keys()), key=lambda r: r.t, default=None)


def run_soak(
    out: Path, ground: Ground, faults: list[Fault], *, step_s: float, calm_s: float, storm_s: float, end_s: float,
    say: Callable[[str], None],
) -> Soak:  # fmt: skip
    """Run all of it.

    Args:
        out: an empty directory.
        ground: where the peers train, as many as it has places for.
        faults: what is done in the storm, in order.
        step_s: the peers' pace.
        calm_s: seconds of training before the storm, by which what it costs is measured.
        storm_s: seconds of the storm.
        end_s: seconds without faults after it, or more if it takes longer until all have landed one round.
        say: told what is done.

    Raises SoakError.
    """
    run_audit = RunAudit()
    with running_processes() as processes:
        addresses = start_bootstrap(
            out, processes, lambda: False, host_maddrs=ground.bootstrap.host_maddrs, enter=ground.bootstrap.enter
        )
        scene = Scene(out, addresses, processes, run_audit, step_s)
        soak = Soak([SoakPeer(i, home, scene) for i, home in enumerate(ground.peers)], run_audit)
        try:
            _conduct(soak, ground, faults, (calm_s, storm_s, end_s), say)
        finally:
            for peer in soak.peers:
                peer.end()
    for peer in soak.peers:
        peer.read()
    return soak


def _conduct(
    soak: Soak, ground: Ground, faults: list[Fault], lasts_s: tuple[float, float, float], say: Callable[[str], None]
) -> None:
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
    storm = _Storm(soak, ground, faults, say)
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
    """Read what the peers record. Raises SoakError when one has ended by itself, or the promise is broken."""
    for peer in soak.peers:
        peer.read()
        if peer.process.exit_status is not None and peer.number not in down:
            said = "\n".join(peer.process.last_lines)
            raise SoakError(f"{peer.name} ended with status {peer.process.exit_status}:\n{said}")
    if soak.run_audit.disagreements:
        raise SoakError(soak.run_audit.disagreements[0])


class _Storm:
    """Does and undoes faults as their times come. `down` are the peers that have no process for now."""

    def __init__(self, soak: Soak, ground: Ground, faults: list[Fault], say: Callable[[str], None]) -> None:
        self._soak, self._ground, self._say = soak, ground, say
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
                self._ground.cut(fault.peers)

    def _end(self, fault: Fault) -> bool:
        """Undo a fault; False while that cannot be done yet."""
        peer = self._soak.peers[fault.peers[0]]
        if fault.kind == CUT:
            self._ground.heal(fault.peers)
        elif fault.kind == "pause":
            peer.resume()
        elif fault.kind == "kill":
            peer.restart()
        elif peer.process.exit_status is None:
            return False
        else:
            peer.replace()
        return True
