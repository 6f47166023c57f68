"""The orchestrator, with fake peers that write metrics when the test says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from p2ptrain.demo import orchestrator
from p2ptrain.demo.orchestrator import DemoFailedError, Orchestrator, peer_directory
from p2ptrain.demo.plan import DemoPlan
from p2ptrain.monitor.peerview import PeerState
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.protocol.event_log.events import Event
from tests.demo import metrics


class FakeProcess:
    """A process that does nothing; `exit_status` is for the test to set."""

    made: list[FakeProcess]

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.arguments, self.log = list(arguments), log
        self.exit_status: int | None = None
        self.last_lines = ["joining", "p2ptrain: error: out of luck"]
        self.made.append(self)

    def kill(self) -> None:
        self.exit_status = -9


class Script:
    """A display that runs one step of a script per update, instead of showing anything."""

    def __init__(self, out: Path, *steps: Callable[[Script], object]) -> None:
        self._out = out
        self._steps = list(steps)

    def update(self, swarm: SwarmView) -> None:
        if self._steps:
            self._steps.pop(0)(self)

    def say(self, number: int, *events: Event) -> None:
        """Append to the metrics of a peer."""
        path = peer_directory(self._out, number) / "metrics.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def all_up(self, peers: int, *, founder: int) -> None:
        for number in range(1, peers + 1):
            reason = "founded the run" if number == founder else "adopted the swarm's state"
            self.say(number, metrics.start(number, 1001), metrics.adopt(reason, 1002), metrics.step(1, 1003))

    def reach(self, peers: int, step: int) -> None:
        """All peers commit a round together, and reach a step."""
        together = tuple(f"Qm{number}" for number in range(1, peers + 1))
        for number in range(1, peers + 1):
            self.say(number, metrics.round_(0, 1030, by=together), metrics.step(step, 1040))


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    fake = type("Process", (FakeProcess,), {"made": []})
    monkeypatch.setattr(orchestrator, "Process", fake)
    monkeypatch.setattr(orchestrator, "REFRESH_S", 0.0)
    return fake.made


def _run(tmp_path: Path, peers: int, script: Script, stop: Callable[[], bool] = lambda: False) -> SwarmView:
    plan = DemoPlan(peers, seed=0, steps=100, sync_every=25, eval_every=10, kill_at_step=40, join_at_step=50)
    swarm = SwarmView(metrics.BEGAN_S, plan.steps)
    Orchestrator(plan, tmp_path, tmp_path / "addresses", [], swarm).run(script.update, stop)
    return swarm


def _end(processes: list[FakeProcess]) -> None:
    for process in processes:
        process.exit_status = process.exit_status or 0


def test_the_founder_is_killed_and_another_peer_started(tmp_path: Path, processes: list[FakeProcess]) -> None:
    script = Script(
        tmp_path,
        lambda script: script.all_up(3, founder=2),
        lambda script: script.reach(3, 40),
        lambda script: [script.say(number, metrics.step(50, 1050)) for number in (1, 3)],
        lambda script: script.say(4, metrics.start(4, 1060), metrics.adopt("late", 1061, round=1, run_step=55)),
        lambda script: _end(processes),
    )
    swarm = _run(tmp_path, 3, script)
    assert swarm.killed_at is not None
    assert swarm.killed_at[0] == 2
    assert swarm.joined_at == (4, 1061)
    assert [process.exit_status for process in processes] == [0, -9, 0, 0]
    outs = [process.arguments[process.arguments.index("--out") + 1] for process in processes]
    assert outs == [str(peer_directory(tmp_path, number)) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("founder", [1, 2])
def test_of_two_peers_the_founder_stays(tmp_path: Path, processes: list[FakeProcess], founder: int) -> None:
    script = Script(
        tmp_path,
        lambda script: script.all_up(2, founder=founder),
        lambda script: script.reach(2, 45),
        lambda script: _end(processes),
    )
    assert _run(tmp_path, 2, script).killed_at is not None
    # It is the first voter, and a quorum alone.
    assert [process.exit_status for process in processes] == ([0, -9] if founder == 1 else [-9, 0])


def test_no_peer_is_killed_before_all_have_started(tmp_path: Path, processes: list[FakeProcess]) -> None:
    script = Script(
        tmp_path,
        lambda script: script.all_up(2, founder=1),
        lambda script: script.reach(2, 45),
        lambda script: _end(processes),
    )
    assert _run(tmp_path, 3, script).killed_at is None


def test_the_founder_is_not_killed_while_it_is_the_only_voter(tmp_path: Path, processes: list[FakeProcess]) -> None:
    alone = metrics.round_(0, 1035, by=("Qm1",), status="solo")
    script = Script(
        tmp_path,
        lambda script: script.all_up(3, founder=1),
        lambda script: [script.say(number, metrics.step(45, 1040)) for number in (1, 2, 3)],
        lambda script: [script.say(number, alone) for number in (1, 2, 3)],
        lambda script: _end(processes),
    )
    assert _run(tmp_path, 3, script).killed_at is None


def test_a_late_peer_that_is_too_late_does_not_restart_the_run(tmp_path: Path, processes: list[FakeProcess]) -> None:
    script = Script(
        tmp_path,
        lambda script: script.all_up(2, founder=1),
        lambda script: script.reach(2, 60),
        lambda script: None,
        lambda script: _end(processes[:2]),
    )
    swarm = _run(tmp_path, 2, script)
    assert [process.exit_status for process in processes] == [0, -9, -9]
    assert swarm.peers[3].state is PeerState.TOO_LATE


def test_a_failure_of_a_peer_shows_its_last_lines(tmp_path: Path, processes: list[FakeProcess]) -> None:
    def fail(script: Script) -> None:
        processes[1].exit_status = 2

    with pytest.raises(DemoFailedError) as caught:
        _run(tmp_path, 2, Script(tmp_path, fail))
    log = peer_directory(tmp_path, 2) / "log.txt"
    assert str(caught.value) == (
        f"peer 2 failed (exit status 2); the last lines of {log}:\n    joining\n    p2ptrain: error: out of luck"
    )


def test_a_peer_that_hangs_is_a_failure(
    tmp_path: Path, processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "SILENCE_S", -1.0)
    with pytest.raises(DemoFailedError, match=r"peer 1 .* failed \(still running\)"):
        _run(tmp_path, 2, Script(tmp_path))


def test_ctrl_c_ends_it(tmp_path: Path, processes: list[FakeProcess]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, 2, Script(tmp_path), stop=lambda: True)
