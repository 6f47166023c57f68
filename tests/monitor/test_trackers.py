"""Figures for TensorBoard, Weights & Biases and Trackio."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.monitor import trackers
from p2ptrain.monitor.trackers import MEAN_S, Figures, Tracker, open_tracker


def _step(step: int, loss: float | None = 2.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 100, "step_s": 0.1, "exchange_s": 0.001}


ROUND = {"status": "committed", "round": 3, "group_size": 4, "wall_s": 1.5, "stall_s": 0.02, "cosine": 0.5}


def test_steps_are_averaged() -> None:
    figures = Figures()
    for number in range(10):
        assert figures.of("step", _step(number, loss=float(number)), 0.1 * number) == []
    ((step, values),) = figures.of("step", _step(11, loss=None), MEAN_S)
    assert step == 11
    assert values == pytest.approx({
        "train/loss": 4.5, "train/tokens_per_s": 1100 / MEAN_S, "train/exchange_share": 0.011 / MEAN_S
    })  # fmt: skip
    assert figures.of("step", _step(12), MEAN_S + 0.1) == []


def test_the_speed_is_that_of_training_without_evaluations() -> None:
    figures = Figures()
    figures.of("eval", {"step": 0, "loss": 5.0}, 100.0)
    figures.of("step", _step(1), 101.0)
    figures.of("step", _step(2), 102.0)
    figures.of("eval", {"step": 2, "loss": 1.0}, 152.0)
    figures.of("eval", {"step": 2, "loss": None}, 202.0)
    ((_, values),) = figures.of("step", _step(3), 202.0 + MEAN_S)
    assert values["train/tokens_per_s"] == pytest.approx(300 / (1 + MEAN_S))


def test_events_of_the_swarm_have_the_step_of_training() -> None:
    figures = Figures()
    figures.of("step", _step(40), 0.0)
    values = {"number": 3, "contributors": 4, "seconds": 1.5, "held_s": 0.02, "cosine": 0.5}
    assert figures.of("round", ROUND, 1.0) == [(40, {f"round/{name}": value for name, value in values.items()})]
    assert figures.of("round", {"status": "skipped", "round": 4}, 1.0) == []
    assert figures.of("peers", {"alive": ["a", "b"]}, 1.0) == [(40, {"swarm/peers": 3.0})]
    assert figures.of("fragments", {"sent": 5, "merged": 4, "skipped": {"stale": 1, "epoch": 2}}, 1.0) == [
        (40, {"fragments/sent": 5.0, "fragments/merged": 4.0, "fragments/skipped": 3.0})
    ]
    ((step, values),) = figures.of("eval", {"step": 50, "loss": 1.0}, 1.0)
    assert (step, values) == (50, {"eval/loss": 1.0, "eval/perplexity": pytest.approx(2.71828, rel=1e-5)})
    assert figures.of("eval", {"step": 50, "loss": None}, 1.0) == []
    assert figures.of("stop", {"reason": "finished"}, 1.0) == []


class Kept:
    """A tracker that keeps what it gets, and fails at `bad` steps."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.bad = bad

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step in self.bad:
            raise OSError("no connection")
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_gets_all_figures_and_the_last_mean_before_it_is_closed() -> None:
    kept = Kept()
    tracker = Tracker(kept)
    tracker.write("step", **_step(7))
    tracker.write("peers", alive=["a"])
    tracker.join()
    tracker.join()
    assert [step for step, _ in kept.logged] == [7, 7]
    assert kept.logged[0][1] == {"swarm/peers": 2.0}
    assert kept.logged[1][1]["train/loss"] == 2.0
    assert kept.closed == 1


def test_a_tracker_that_fails_loses_figures_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(bad=(5,))
    tracker = Tracker(kept)
    tracker.write("eval", step=5, loss=1.0)
    tracker.write("eval", step=6, loss=1.0)
    tracker.join()
    assert [step for step, _ in kept.logged] == [6]
    assert "figures for the tracker are lost" in caplog.text


def test_a_tracker_that_hangs_does_not_hang_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    go_on = threading.Event()

    class Stuck(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            go_on.wait()

    tracker = Tracker(Stuck())
    for number in range(trackers.MAX_WAITING + 10):
        tracker.write("eval", step=number, loss=1.0)
    tracker.join()
    go_on.set()


def test_a_peer_that_leaves_does_not_wait_for_a_tracker() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            begun.set()
            assert go_on.wait(60)
            super().log(step, values)

    kept = Slow()
    tracker = Tracker(kept)
    tracker.write("eval", step=5, loss=1.0)
    assert begun.wait(60)
    tracker.close()  # it would never return
    assert (kept.logged, kept.closed) == ([], 0)
    go_on.set()
    tracker.join()
    assert ([step for step, _ in kept.logged], kept.closed) == ([5], 1)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_opened_with_the_run_as_group(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, Any]] = []
    library = types.ModuleType(name)
    library.__spec__ = importlib.util.spec_from_loader(name, None)
    library.init = lambda **given: calls.append(("init", given))  # type: ignore[attr-defined]
    library.log = lambda values: calls.append(("log", values))  # type: ignore[attr-defined]
    library.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, library)
    tracker = open_tracker(name, tmp_path / "p2ptrain-r-2", "r")
    tracker.write("eval", step=3, loss=0.0)
    tracker.join()
    assert calls == [
        ("init", {"project": "p2ptrain", "group": "r", "name": "p2ptrain-r-2"}),
        ("log", {"eval/loss": 0.0, "eval/perplexity": 1.0, "step": 3}),
        ("finish", None),
    ]


def test_a_missing_package_and_one_that_cannot_be_opened_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(ConfigError, match=r"--log wandb needs wandb; install with: pip install"):
            open_tracker("wandb", tmp_path, "r")

    def fail(**given: Any) -> None:
        raise RuntimeError("api_key not configured\nmore")

    library = types.ModuleType("wandb")
    library.__spec__ = importlib.util.spec_from_loader("wandb", None)
    library.init = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.raises(ConfigError, match=r"--log wandb: cannot be opened \(api_key not configured\)$"):
        open_tracker("wandb", tmp_path, "r")


def test_tensorboard_writes_beside_the_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    monkeypatch.setattr(trackers, "require_extra", lambda extra, what: None)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = open_tracker("tensorboard", tmp_path, "r")
    tracker.write("peers", alive=[])
    tracker.join()
    assert written == [("swarm/peers", 1.0, 0), ("closed", 0.0, 0)]
