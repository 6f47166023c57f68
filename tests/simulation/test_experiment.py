"""Experiments from flags and TOML, and messages about mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.simulation.experiment import Experiment, read_experiments
from p2ptrain.simulation.schedule import ScheduledEvent


def test_settings_of_the_run_and_of_the_simulation_go_where_they_belong() -> None:
    experiment = Experiment.of(peers=3, steps=40, sync_every=7, lr=1, speeds=[1, 0.5], seed=5)
    assert (experiment.peers, experiment.speeds, experiment.seed) == (3, (1.0, 0.5), 5)
    run = experiment.run
    assert (run.total_steps, run.sync_every, run.lr, run.run_seed, run.model) == (40, 7, 1.0, 5, "gpt-demo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peer": 3}, "unknown setting 'peer'; did you mean peers?"),
        ({"name": ".."}, r"name = '\.\.': must be a text in one line that can name a directory"),
        ({"name": ""}, "name = ''"),
        ({"name": "a\0b"}, "name = "),
        ({"peers": 0}, "peers = 0: must be from 1 to 1000"),
        ({"peers": "3"}, "peers = '3': must be of type int"),
        ({"steps": 0}, "steps = 0: must be 1 or more"),
        ({"drop": 1.0}, "drop = 1.0: must be at least 0 and below 1"),
        ({"loss": -0.1}, "loss = -0.1"),
        ({"latency_s": -1}, "latency_s"),
        ({"bandwidth_mbit": float("inf")}, "bandwidth_mbit"),
        ({"speeds": [1, 0]}, "speeds = .*: must be above 0"),
        ({"speeds": ["fast"]}, "speeds = .*: must be numbers"),
        ({"peers": 1, "speeds": [1, 1]}, "at most one for each of 1 peers"),
        ({"sync_every": 0}, "sync_every = 0"),
        ({"round_codec": "int3"}, "round_codec"),
        ({"schedule": ["10:explode:1"]}, "unknown action 'explode'"),
        ({"schedule": ["10:crash"]}, "must be STEP:ACTION:PEER"),
        ({"schedule": ["10:speed:1:0.5:9"]}, "more than four parts"),
        ({"schedule": ["10:speed:1:0"]}, "a speed above 0"),
        ({"schedule": ["5:crash:9"], "peers": 2}, "schedule 5:crash:9: .* the 2 peers are 0 to 1; name one of them"),
        ({"schedule": ["5:cut:1"], "peers": 1}, "schedule 5:cut:1:1: .* the only peer is 0"),
        ({"schedule": ["10:crash:1"]}, "schedule 10:crash:1: .* the run has 10 steps; use an earlier step"),
        ({"schedule": ["5:join:0", "2:speed:0:2"]}, "schedule 5:join:0: .* peer 0 is already in the run"),
        ({"schedule": ["5:crash:0", "6:leave:0"]}, "schedule 6:leave:0: .* peer 0 is not in the run then"),
        ({"schedule": ["5:speed:9:0.5", "6:join:9"]}, "schedule 5:speed:9:0.5: .* peer 9 is not in the run then"),
        ({"schedule": ["5:pause:0", "6:pause:0"]}, "schedule 6:pause:0: .* is already paused"),
        ({"schedule": ["5:pause:0", "6:crash:0", "7:join:0", "8:resume:0"]}, "schedule 8:resume:0: .* no pause of"),
        ({"schedule": ["5:mend:0"]}, "schedule 5:mend:0: .* no cut of peer 0 comes before it"),
        ({"schedule": ["5:widen:0"]}, "schedule 5:widen:0: .* no narrow of"),
        ({"schedule": [3]}, "must be a text such as 300:crash:2"),
        ({"run_id": "x"}, "unknown setting 'run_id'"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.of(**{"steps": 10, **settings})


def test_defaults_that_depend_on_other_settings_hold_here_too() -> None:
    assert Experiment.of(steps=10, inner_optimizer="muon").run.round_codec == "int4"
    assert Experiment.of(steps=10, averaging="pairwise").run.outer_optimizer == "sgdm"


def test_a_schedule_says_who_is_there_when() -> None:
    experiment = Experiment.of(peers=2, steps=10, schedule=["3:join:3", "2:crash:0", "5:join:0", "4:join:1"])
    assert experiment.schedule[0] == ScheduledEvent(3, "join", 3)
    assert [experiment.starts_late(peer) for peer in range(4)] == [False, True, True, True]


def test_arms_differ_in_what_they_name(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        'title = "Two"\npeers = 2\nsteps = 30\n'
        '[[arm]]\nname = "plain"\nfragment_fraction = 0.0\n'
        '[[arm]]\nname = "slow"\nschedule = [{step = 3, action = "speed", peer = 1, value = 0.5}]\n'
    )
    title, (plain, slow) = read_experiments(file, steps=20)
    assert title == "Two"
    assert (plain.name, plain.run.fragment_fraction, plain.peers) == ("plain", 0.0, 2)
    assert (slow.name, slow.schedule) == ("slow", (ScheduledEvent(3, "speed", 1, 0.5),))
    assert {plain.run.total_steps, slow.run.total_steps} == {20}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peers = ", "is not valid TOML"),
        ("peeers = 2", "did you mean peers"),
        ("arm = 3", "written as"),
        ('steps = 3\n[[arm]]\nname = "a"\n[[arm]]\nname = "a"', "a different name"),
        ('steps = 3\n[[arm]]\nname = "a/b"\n[[arm]]\nname = "a-b"', "a different name"),
        ("[[arm]]\nsteps = 1\nschedule = [{step = 1}]", "must be a text"),
        ("steps = 1\nstep_s = 1" + "0" * 400, "step_s = 10+…: must be a finite number above 0"),
        ("steps = 1\nspeeds = [1" + "0" * 400 + "]", r"speeds = \(10+…: must be above 0"),
        ("steps = 1\npeers = 1" + "0" * 400, "peers = 10+…: must be from 1 to 1000"),
        ("peers = 1" + "0" * 5000, "too many digits"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_experiments(file)
    assert str(file) in str(caught.value)


def test_an_arms_directory_is_below_the_one_that_it_is_put_in() -> None:
    assert Experiment.of(steps=1, name="../../SGD 0.3 / 0.9").directory == "..-..-SGD 0.3 - 0.9"


@pytest.mark.parametrize(("name", "count"), [("simulate", 2), ("sections", 3)])
def test_the_examples_can_be_read(name: str, count: int) -> None:
    _, arms = read_experiments(Path(__file__).parents[2] / "examples" / f"{name}.toml")
    assert len(arms) == count
