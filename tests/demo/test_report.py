"""The results, the plot and the report, from made-up metrics and real checkpoints."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from p2ptrain.algorithms.indexspace import IndexSpace, ParameterView
from p2ptrain.cli.main import cli
from p2ptrain.demo import demo
from p2ptrain.demo.orchestrator import peer_directory
from p2ptrain.demo.plan import DemoPlan, make_plan
from p2ptrain.demo.plot import GROUPS, save_plot, smooth
from p2ptrain.demo.report import Results, format_report, measure
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.table import merge
from p2ptrain.training import checkpoint
from p2ptrain.training.generation import load_model
from p2ptrain.training.models import build
from tests.demo.metrics import round_, small_swarm
from tests.training.characters import VOCAB_SIZE

PARAMETERS = 110_464
RUN = RunConfig(model="gpt-demo", data="stdlib", total_steps=100)


def _plan() -> DemoPlan:
    return make_plan(peers=3, seed=5, step_s=0.01, time_left_s=100, bootstrap_s=1)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Results of three peers whose weights differ a little from an anchor of seed 1."""
    anchor_model = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=1)
    space = IndexSpace([(name, tuple(p.shape)) for name, p in anchor_model.named_parameters()])
    anchor = torch.empty(space.num_blocks, 64)
    ParameterView(space, [p.data for p in anchor_model.parameters()]).read(anchor)
    for number in (2, 3, 4):
        model = {name: value + 1e-5 * number for name, value in anchor_model.state_dict().items()}
        info = {"run": RUN.to_dict(), "peer_id": f"Qm{number}", "round": 2, "anchor_hash": "bb" * 32}
        state = {"model": model, "peer": {"anchor": anchor}}
        checkpoint.save(peer_directory(tmp_path, number), checkpoint.Checkpoint(100, info, state))
    return measure(tmp_path, small_swarm(), peers_at_once=3)


def test_every_survivor_is_measured_before_and_after_the_last_round(results: Results) -> None:
    assert [(peer.number, peer.steps, peer.before) for peer in results.peers] == [
        (2, 90, 2.52), (3, 90, 2.53), (4, 50, 2.54),
    ]  # fmt: skip
    assert all(peer.after == pytest.approx(results.merged, abs=1e-3) for peer in results.peers)
    assert results.same_anchor
    assert results.correlation_end == pytest.approx(1.0, abs=1e-5)
    assert results.correlation_lowest is not None
    assert results.correlation_lowest < 1.0
    assert results.parameters == PARAMETERS
    assert results.skipped == {"superseded": 6}


def test_the_merged_model_is_the_anchor(results: Results, tmp_path: Path) -> None:
    assert results.checkpoint == tmp_path / "checkpoint-100"
    expected = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=1).state_dict()
    loaded = load_model(tmp_path)[0].state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert results.text.startswith("def ")


def test_traffic_is_per_step_and_peer() -> None:
    traffic = small_swarm().bytes_per_step(parameters=1000, peers_at_once=4)
    steps = 3 * 40 + 3 * 50
    assert traffic.fragments == pytest.approx(3 * 3500 / steps)
    assert traffic.rounds == pytest.approx(6 * 500 / steps)
    assert traffic.dense == 2 * 3 / 4 * 4 * 1000


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    save_plot(small_swarm(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_the_mean() -> None:
    points = [(float(n), float(n % 7)) for n in range(14 * GROUPS)]
    smoothed = smooth(points)
    assert len(smoothed) == GROUPS
    assert sum(loss for _, loss in smoothed) / GROUPS == pytest.approx(3.0)
    assert len(smooth(points[:700])) == 70
    assert smooth([(1.0, 2.0)]) == [(1.0, 2.0)]
    assert smooth([]) == []


def test_the_report_has_results_and_commands_that_work(results: Results) -> None:
    plan, out = _plan(), Path("p2ptrain demo")
    results = dataclasses.replace(results, checkpoint=out / "checkpoint-100")
    page = format_report(results, small_swarm(), plan, out, bootstrap_id="QmBoot", took_s=119)
    assert page.startswith("Done in 1:59: 4 peers made 270 inner steps in a run of 100.\n")
    assert "Rounds committed: 2 (2 by 3 peers); their anchors were the same, bit for bit," in page
    assert all(len(line) < 80 for line in page.splitlines() if not line.startswith("p2ptrain "))
    bootstrap, join = (shlex.split(line) for line in page.splitlines() if line.startswith("p2ptrain "))
    assert bootstrap[:2] == ["p2ptrain", "bootstrap"]
    assert bootstrap[-1] == "p2ptrain demo/bootstrap/identity.key"
    names = [flag.removeprefix("--").replace("-", "_") for flag in join[2::2]]
    flags: dict[str, object] = dict(zip(names, join[3::2], strict=True))
    assert str(flags["initial_peers"]).endswith("/tcp/4001/p2p/QmBoot")
    flags["initial_peers"] = (flags["initial_peers"],)
    assert merge(flags, {}).resolve_run(None).total_steps == plan.steps


def test_a_demo_with_unequal_anchors_fails_after_its_report(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_bootstrap(out: Path, *others: object) -> Path:
        (out / "addresses").write_text("/ip4/127.0.0.1/tcp/1/p2p/QmBoot\n", encoding="utf-8")
        return out / "addresses"

    unequal = dataclasses.replace(results, same_anchor=False)
    monkeypatch.setattr(demo, "start_bootstrap", start_bootstrap)
    monkeypatch.setattr(demo, "measure_step_s", lambda peers: 0.01)
    monkeypatch.setattr(demo.Orchestrator, "run", lambda self, show, stop: None)
    monkeypatch.setattr(demo, "measure", lambda out, swarm, peers_at_once: unequal)
    monkeypatch.setattr(demo, "save_plot", lambda swarm, path: None)
    result = CliRunner().invoke(cli, ["demo", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 1
    assert "NOT THE SAME" in result.output
    assert "p2ptrain: error: the peers ended with different anchors;" in result.output


def test_a_round_with_two_states_is_unequal(results: Results, tmp_path: Path) -> None:
    swarm = small_swarm()
    assert results.same_anchor
    swarm.apply(3, round_(2, 1017, by=("Qm2", "Qm3"), anchor="cc" * 32))
    swarm.apply(2, round_(2, 1017, by=("Qm2", "Qm3"), anchor="dd" * 32))
    assert not measure(tmp_path, swarm, peers_at_once=3).same_anchor


def test_the_help_has_an_example() -> None:
    result = CliRunner().invoke(cli, ["demo", "--help"])
    assert result.exit_code == 0
    assert "\n      p2ptrain demo\n" in result.output
