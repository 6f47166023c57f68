"""Random faults in simulated swarms: reproducible from the seed, effective, undone, and reported."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.simulation.experiment import Experiment, read_experiments
from p2ptrain.simulation.records import Records, format_run_audits
from p2ptrain.simulation.schedule import KINDS
from p2ptrain.simulation.swarm import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "storm.toml"


def experiment(**settings: Any) -> Experiment:
    defaults = {"peers": 4, "steps": 60, "sync_every": 15, "eval_every": 60, "step_s": 1.0, "batch_size": 1}
    return Experiment.of(**{**defaults, **settings})


def of_kind(kind: str) -> Records:
    return simulate(experiment(faults_per_hour=400.0, fault_s=6.0, faults=[kind], seed=2))


def test_a_storm_is_drawn_from_the_seed_and_its_rate() -> None:
    hour = {"peers": 32, "steps": 3660, "sync_every": 60, "faults_per_hour": 125.0}
    storm = experiment(**hour).faults_drawn
    assert storm == experiment(**hour).faults_drawn != experiment(**hour, seed=1).faults_drawn
    assert 90 <= len(storm) <= 160
    kinds = Counter(fault.kind for fault in storm)
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) > 15
    assert all(10 <= fault.ends - fault.begins <= 32 for fault in storm)
    assert max(fault.ends for fault in storm) <= 3600
    assert any(len(fault.peers) > 1 for fault in storm)
    assert experiment(**{**hour, "faults_per_hour": 0.0}).faults_drawn == ()


def test_a_peer_suffers_from_one_fault_at_a_time() -> None:
    storm = experiment(steps=2000, faults_per_hour=3000.0).faults_drawn
    free_from = [0] * 4
    for fault in storm:
        for peer in fault.peers:
            assert fault.begins >= free_from[peer]
            free_from[peer] = fault.ends + 1
        suffering = sum(other.begins <= fault.begins <= other.ends for other in storm for _ in other.peers)
        assert suffering <= 2
    assert len(storm) > 100


def test_what_is_done_is_undone() -> None:
    undo = {"crash": "join", "pause": "resume", "cut": "mend", "narrow": "widen"}
    open_: dict[tuple[int, str], int] = {}
    for scheduled_event in experiment(steps=2000, faults_per_hour=1000.0).scheduled_events:
        if scheduled_event.action in undo:
            assert (scheduled_event.peer, undo[scheduled_event.action]) not in open_
            open_[scheduled_event.peer, undo[scheduled_event.action]] = scheduled_event.step
        else:
            assert open_.pop((scheduled_event.peer, scheduled_event.action)) < scheduled_event.step
    assert not open_


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"faults_per_hour": -1.0}, "faults_per_hour = -1.0"),
        ({"faults": ["quake"]}, r"faults = \['quake'\]: must be some of crash, pause, partition, slow"),
        ({"faults": []}, "faults"),
        ({"faults": "crash"}, "faults = 'crash': must be of type tuple"),
        ({"fault_s": 0}, "fault_s"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(**settings)


def test_the_goodput_of_a_run_that_nobody_ends_is_until_its_last_step() -> None:
    records = simulate(Experiment.of(peers=2, steps=20, sync_every=5, schedule=["12:crash:0", "12:crash:1"]))
    assert 0.5 < records.goodput <= 1.1


def test_crashed_peers_come_back_and_their_steps_are_missed() -> None:
    records = of_kind("crash")
    crashes = len(records.experiment.faults_drawn)
    assert crashes >= 2
    assert len(records.events) == 4 + crashes
    late = [join for join in records.run_audit.joins if join.started_s >= records.began_s]
    assert len(late) == crashes
    assert all(join.step_s is not None and join.step_s < 10 for join in late)
    away = sum(fault.ends - fault.begins for fault in records.experiment.faults_drawn)
    assert records.goodput == pytest.approx(1 - away / 240, abs=0.07)
    assert records.goodput < 0.97
    assert records.steps_lost > 0
    assert min(records.run_audit.participation) < 4


def test_frozen_machines_stand_still_and_wake_up() -> None:
    records = of_kind("pause")
    away = sum(fault.ends - fault.begins for fault in records.experiment.faults_drawn)
    assert records.goodput == pytest.approx(1 - away / 240, abs=0.07)
    assert records.goodput < 0.97
    assert not any(join.started_s > records.began_s for join in records.run_audit.joins)


@pytest.mark.parametrize("kind", ["partition", "slow"])
def test_network_faults_delay_no_peer(kind: str) -> None:
    records = of_kind(kind)
    assert len(records.experiment.faults_drawn) >= 2
    assert records.goodput > 0.98
    assert records.run_audit.agreement == 1.0


def test_a_calm_run_has_all_of_its_steps() -> None:
    records = simulate(experiment())
    assert records.goodput == pytest.approx(1, abs=0.02)
    assert (records.steps_lost, records.run_audit.repairs, len(records.run_audit.committed)) == (0, 0, 4)


@pytest.mark.long
def test_the_example_in_small_is_told(tmp_path: Path) -> None:
    _, arms = read_experiments(EXAMPLE)
    assert [arm.peers for arm in arms] == [32, 32]
    assert len(arms[1].faults_drawn) > 12
    _, arms = read_experiments(EXAMPLE, peers=4, steps=90, sync_every=15, eval_every=90)
    storm = dataclasses.replace(arms[1], faults_per_hour=400.0, fault_s=8.0)
    first, again = simulate(storm), simulate(storm)
    assert first.events == again.events
    told = format_run_audits([first])
    assert "100%" in told.splitlines()[1]
    assert f"{first.goodput:.2%}" in told
    first.write(tmp_path)
    lines = (tmp_path / "schedule.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "t,action,peer,value"
    assert len(lines) == 1 + len(storm.scheduled_events)


def test_a_broken_promise_stops_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from p2ptrain.protocol.node import node

    honest = node.Node.round_ended

    def lies(self: node.Node, report: Any) -> None:
        honest(self, dataclasses.replace(report, state_hash="?") if self.peer_id == "peer-2" else report)

    monkeypatch.setattr(node.Node, "round_ended", lies)
    with pytest.raises(AssertionError, match=r"promise .* \(seed 0\): round 0 of lineage .*peer-2"):
        simulate(experiment())
