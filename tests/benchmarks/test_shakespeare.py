"""The runs of docs/evidence/results.md: settings and data, what is read of events, the tables and pictures."""

from __future__ import annotations

import dataclasses
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kept_runs
from benchmarks.shakespeare import peers, simulated
from benchmarks.shakespeare.cells import (
    ALONE,
    BATCH,
    CONTEXT,
    LARGE,
    PARALLEL,
    PEERS,
    SIMULATED,
    TOGETHER,
    Cell,
    H,
    stages,
)
from benchmarks.shakespeare.data import held_out_loss, prepare
from benchmarks.shakespeare.events import measures
from benchmarks.shakespeare.model import GATE_VARIABLE, nanogpt_cpu
from benchmarks.shakespeare.plot import methods
from benchmarks.shakespeare.report import BEGIN, END, compared, data_parallel_mb, grid, grouped, read, report
from p2ptrain.cli.join import join
from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import merge
from p2ptrain.training.models import GPT, GPTConfig

CELLS = [cell for _, cells in stages() for cell in cells]
MUON = Cell(TOGETHER, "muon", 500, 1, "int4", 0.02)


def test_every_run_is_listed_once_and_its_command_line_gives_its_settings() -> None:
    assert len({cell.name for cell in CELLS}) == len(set(CELLS)) == len(CELLS) == 3 * (5 * 2 + 2 * 12 + 14 + 2)
    for cell in CELLS:
        if cell.arm == SIMULATED:
            continue
        out = Path("out")
        given = [
            *peers.flags(cell, Path("data")),
            *peers.machine_flags(cell, 3, out),
            "--initial-peers",
            "/ip4/1.2.3.4",
        ]
        values = join.make_context("join", list(given)).params
        settings = merge({name: value for name, value in values.items() if value is not None}, {})
        explicit = {**settings.explicit_run()}
        assert {name: explicit[name] for name in cell.settings} == cell.settings
        assert settings.values["batch_tokens"] == cell.batch * CONTEXT
    assert Cell(LARGE, "adamw", 500, 0).batch == PEERS * BATCH


def test_the_data_is_nanogpts(tmp_path: Path) -> None:
    alphabet = (string.ascii_letters + string.digits + "\n .")[:65]
    text = (alphabet * 30)[: 65 * 30 - 3]
    (tmp_path / "input.txt").write_text(text)
    data = prepare(tmp_path / "input.txt", tmp_path / "data")
    train, held_out = (np.fromfile(data / name, np.uint16) for name in ("train.bin", "val.bin"))
    assert len(train) == int(0.9 * len(text))
    assert "".join(sorted(alphabet)[token] for token in [*train, *held_out]) == text
    with torch.no_grad():
        model = nanogpt_cpu(65)
        for parameter in model.parameters():
            parameter.zero_()
    assert held_out_loss(model, data, windows=10) == pytest.approx(math.log(65))
    assert sum(parameter.numel() for parameter in model.parameters()) == 809_856
    (tmp_path / "input.txt").write_text("abc")
    with pytest.raises(ConfigError, match="3 different characters, tinyshakespeare 65"):
        prepare(tmp_path / "input.txt", tmp_path / "data")


def test_training_begins_when_the_gate_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE_VARIABLE, str(tmp_path / "start"))
    model = nanogpt_cpu(65)
    model.eval()(torch.zeros(1, 8, dtype=torch.int64))
    waits = iter([None, (tmp_path / "start").touch])

    def sleep(seconds: float) -> None:
        (next(waits) or (lambda: None))()

    monkeypatch.setattr("benchmarks.shakespeare.model.time.sleep", sleep)
    model.train()(torch.zeros(1, 8, dtype=torch.int64))
    assert next(waits, "asked twice") == "asked twice"
    (tmp_path / "start").unlink()
    model.train()(torch.zeros(1, 8, dtype=torch.int64))


def events(delay_s: float) -> list[dict[str, Any]]:
    """Of a peer that makes a step a second, from 10 s on; rounds of 2 steps land `delay_s` after they are due."""
    found: list[dict[str, Any]] = [{"event": "eval", "t": 5.0, "step": 0, "loss": 4.0}]
    for step in range(1, 7):
        found.append({"event": "step", "t": 10.0 + step, "step": step, "tokens": 10, "exchange_s": 0.1})
    for number in range(3):
        found.append({
            "event": "round", "t": 12.0 + 2 * number + delay_s, "round": number, "contributors": ["a", "b"],
            "bytes_sent": 1_000_000, "wall_s": delay_s + 0.5,
        })  # fmt: skip
    fragments = {
        "event": "fragments",
        "t": 13.5,
        "sent": 5,
        "merged": 4,
        "skipped": {"epoch": 1},
        "bytes_sent": 500_000,
    }
    return [*found, fragments, {"event": "eval", "t": 14.5, "step": 4 + int(delay_s), "loss": 2.0 + delay_s}]


def test_measures_are_read_from_events() -> None:
    found = measures([events(0.0), events(1.0)], started_s=10.0, eval_every=2)
    assert (found["tokens"], found["mb_per_peer"], found["fragment_mb_per_peer"]) == (120, 3.5, 0.5)
    assert found["fragments"] == {"sent": 10, "merged": 8, "skipped": 2}
    assert (found["seconds"], found["exchange_share"]) == (6.0, 0.12)
    assert [round_["late_steps"] for round_ in found["rounds"]] == [1.5, 1.5, None]
    # Before the start no time has passed. By 14.5 s the first peer had two rounds, the second one.
    assert found["curve"] == [[0, 4.0, 0.0, 0.0], [4, 2.5, 4.5, 2.0]]


def result(cell: Cell) -> dict[str, Any]:
    return {
        "loss": 2.0 + 0.1 * cell.seed, "tokens": 1_536_000, "mb_per_peer": 9.25, "seconds": 100.0, "load": [1.0, 3.0],
        "rounds": [
            {"round": 0, "contributors": 4, "late_steps": 1.5}, {"round": 1, "contributors": 3, "late_steps": 4.0}
        ],
        "curve": [[0, 4.2, 0.0, 0.0], [250, 2.5, 50.0, 4.0], [500, 2.0, 100.0, 9.25]],
    }  # fmt: skip


def test_runs_that_are_done_are_read_back_and_reported(tmp_path: Path) -> None:
    file, page = tmp_path / "results.jsonl", tmp_path / "results.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    assert read(file) == {}
    done = [MUON, dataclasses.replace(MUON, seed=0), Cell(ALONE, "adamw", 2000, 0), Cell(LARGE, "adamw", 500, 0)]
    done += [Cell(PARALLEL, "adamw", 500, 0)]
    done += [dataclasses.replace(MUON, arm=SIMULATED)]
    for cell in done:
        kept_runs.append(file, {**result(cell), **dataclasses.asdict(cell)})
    results = read(file)
    assert set(results) == set(done)
    assert [len(runs) for runs in grouped(results)] == [1, 1, 2, 1, 1]
    report(results, page, tmp_path)
    written = page.read_text()
    assert written.startswith(f"before\n\n{BEGIN}\n\n")
    assert written.endswith(f"{END}\n\nafter\n")
    assert "old" not in written
    lines = written.splitlines()
    assert "| 5 | four peers, 500 steps: the other codecs and p | 2 of 30 |" in lines
    assert (
        "| four peers | muon | 500 | int4, 2 % | 2 | 2.050 (2.000 to 2.100) | 1.54M | 9.2 | 2.8, at most 4; 2 of 4 "
        "without a peer | 100 (2) |"
    ) in lines
    assert "| muon, int4 | – | – | 2.100, 9.2 MB |" in lines
    assert not written.count("| four peers, simulated |")
    assert "| one peer | adamw | 2000 | – | 1 | 2.000 | 1.54M | 0 | – | 100 (2) |" in lines
    # No picture of curves with Muon: of the grid they show only what is run first.
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["adamw.png", "bytes.png", "simulated.png"]


def test_four_methods_and_one_machine_are_compared_by_their_bytes(tmp_path: Path) -> None:
    cells = {
        "one machine alone": Cell(ALONE, "adamw", 2000, 0),
        "data parallel": Cell(LARGE, "adamw", 2000, 0),
        "gossip alone (SPARTA)": Cell(SIMULATED, "adamw", 2000, 0, "", 0.005),
        "rounds alone (DiLoCo)": Cell(SIMULATED, "adamw", 2000, 0, "int8", 0.0),
        "rounds and gossip (p2ptrain)": Cell(SIMULATED, "adamw", 2000, 0, "int8", 0.005),
    }
    results = {cell: {**result(cell), **dataclasses.asdict(cell)} for cell in [MUON, *cells.values()]}
    assert {name: runs[0][0] for name, runs in methods(grouped(results)).items()} == cells
    report(results, _page(tmp_path), tmp_path)
    assert (tmp_path / "bytes.png").stat().st_size > 10_000
    gossip, rounds = (
        cells[f"{name} alone ({of})"].settings for name, of in (("gossip", "SPARTA"), ("rounds", "DiLoCo"))
    )
    assert (gossip["sync_every"], gossip["fragment_fraction"]) == (2000, 0.005)
    assert (rounds["sync_every"], rounds["fragment_fraction"]) == (H, 0.0)


def _page(directory: Path) -> Path:
    page = directory / "results.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    return page


def test_simulated_peers_are_those_of_the_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same settings; and it runs, with a small model and few steps."""
    (tmp_path / "input.txt").write_text((string.ascii_letters + string.digits + "\n .")[:65] * 100)
    data = prepare(tmp_path / "input.txt", tmp_path / "data")
    cell = dataclasses.replace(MUON, arm=SIMULATED)
    found = simulated.experiment(cell, data)
    assert {name: getattr(found.run, name) for name in MUON.settings} == MUON.settings
    assert (found.peers, found.batch_size, found.run.sync_every, found.run.vocab_size) == (PEERS, BATCH, H, 65)
    monkeypatch.setattr(simulated, "MODEL", f"{__name__}:small")
    monkeypatch.setattr("benchmarks.shakespeare.cells.H", 10)
    measured = simulated.run(dataclasses.replace(cell, steps=20, optimizer="adamw"), data, tmp_path)
    assert [round_["contributors"] for round_ in measured["rounds"]] == [4, 4]
    # Virtual time: each round lands as late as the others, and no fragment waits for a busy core.
    assert {round_["late_steps"] for round_ in measured["rounds"]} <= {2.0, 3.0, None}
    assert (measured["tokens"], measured["fragments"]["sent"] > 0) == (4 * 20 * BATCH * 16, True)
    assert len(measured["losses"]) == 4
    assert measured["loss"] < math.log(65)


def small(vocab_size: int) -> torch.nn.Module:
    return GPT(GPTConfig(vocab_size=vocab_size, layers=1, heads=1, width=8, context=16))


def test_simulated_runs_are_beside_real_ones_and_in_the_grid() -> None:
    twin = dataclasses.replace(MUON, arm=SIMULATED)
    results = {cell: result(cell) for cell in (MUON, twin, dataclasses.replace(twin, p=0.0))}
    results[twin]["loss"] = 2.075
    assert compared(results).splitlines()[2:] == [
        "| muon | 500 | int4, 2 % | 2.100 | 2.075 | -0.025 | 9.2 | 9.2 |"
    ]  # fmt: skip
    assert grid(results).splitlines()[-1] == "| muon, int4 | 2.100, 9.2 MB | – | 2.075, 9.2 MB |"


def test_four_processes_send_six_times_the_parameters_a_step() -> None:
    # Measured: 243.13 MB in 50 steps.
    assert data_parallel_mb(50) == pytest.approx(243.13, rel=0.002)
