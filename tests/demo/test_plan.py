"""The length and the schedule of a demo, and the calibration."""

from __future__ import annotations

import time

import psutil
import pytest

from p2ptrain.demo.plan import BOOTSTRAP_START_S, LATE_START_S, ROUNDS, make_plan, measure_step_s
from p2ptrain.settings.table import SETTINGS, merge
from p2ptrain.training.trainer import Trainer


@pytest.mark.parametrize("step_s", [0.003, 0.012, 0.2])
@pytest.mark.parametrize("time_left_s", [-5.0, 20.0, 115.0, 3600.0])
@pytest.mark.parametrize("slowness", [1, 4])
def test_a_run_has_whole_rounds_and_kills_before_it_adds(step_s: float, time_left_s: float, slowness: int) -> None:
    bootstrap_s = slowness * BOOTSTRAP_START_S
    plan = make_plan(peers=4, seed=0, step_s=step_s, time_left_s=time_left_s, bootstrap_s=bootstrap_s)
    assert plan.steps == ROUNDS * plan.sync_every
    assert 0 < plan.eval_every < plan.sync_every
    assert 0 < plan.kill_at_step < plan.join_at_step <= round(0.55 * plan.steps)
    # The late peer trains before the end.
    assert plan.join_at_step * step_s + slowness * LATE_START_S < 0.8 * plan.steps * step_s


def test_it_fills_the_time() -> None:
    plan = make_plan(peers=4, seed=0, step_s=0.01, time_left_s=1000, bootstrap_s=1)
    assert 0.9 * 1000 < plan.steps * 0.01 < 1000


def test_its_flags_are_settings_of_a_run() -> None:
    plan = make_plan(peers=4, seed=7, step_s=0.01, time_left_s=100, bootstrap_s=1)
    flags = dict(zip(plan.run_flags[::2], plan.run_flags[1::2], strict=True))
    names = {setting.flag: setting.name for setting in SETTINGS.values()}
    run = merge({names[flag]: value for flag, value in flags.items()}, {}).resolve_run(None)
    assert (run.total_steps, run.sync_every, run.run_seed) == (plan.steps, plan.sync_every, 7)
    assert (
        plan.peer_seed(1)
        != plan.peer_seed(2)
        != make_plan(peers=4, seed=8, step_s=1, time_left_s=1, bootstrap_s=1).peer_seed(1)
    )


@pytest.mark.processes
def test_a_step_is_measured_beside_busy_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[psutil.Process] = set()
    step = Trainer.step

    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "time.monotonic" in str(child.cmdline())]

    def step_beside(self: Trainer, number: int) -> tuple[float, int]:
        if number == 0 and (neighbours := found()):
            while len(neighbours) < 3:  # the last may not have begun its program
                neighbours = found()
            while not all(sum(neighbour.cpu_times()[:2]) > 0.1 for neighbour in neighbours):
                time.sleep(0.01)
            seen.update(neighbours)
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", step_beside)
    assert measure_step_s(4) > 0
    assert len(seen) == 3
    assert not any(neighbour.is_running() for neighbour in seen)
