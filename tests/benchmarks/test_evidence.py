"""The table of long runs: what of a run's output is its result, and which runs are made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import evidence
from benchmarks.evidence import RUNS, Run, result_of


def run_of(name: str) -> Run:
    return next(run for run in RUNS if run.name == name)


@pytest.mark.parametrize(
    ("name", "printed", "result"),
    [
        (
            "test",
            "== 6625 passed, 20 skipped, 46 warnings in 866.07s (0:14:26) ==\n= 94 passed, 1 skipped in 344.1s =",
            "6625 passed, 20 skipped, 94 passed, 1 skipped",
        ),
        (
            "hostile",
            "1 of 12: Commit: harmless\n2 of 12: Beat: harmless\n3 of 12: Ask: slowed to 72 %, grown by 60 MB\n",
            "2 × harmless, slowed to 72 %, grown by 60 MB",
        ),
        (
            "soak",
            "| goodput: inner steps in the storm | reported | 82.5% |\n"
            "| time that exchanges blocked the training of live peers | ≤ 3 % | 9.40% |\n",
            "goodput 82.5%, training blocked 9.40%",
        ),
        ("compose-test", "ok 3.0 s  up\npassed: 20 checks in 1863 s\n", "20 checks"),
        ("pythons", "Python 3.12 (/usr/bin/python3.12): installed, and two peers\n", "Python 3.12"),
        ("bench-far", "│ a round │ ≤ 6 s │ 5 s │ reached │ 9 s │\n│ b │ 1 │ 2 │ MISSED │ - │\n", "reached, MISSED"),
        ("links", "| a | table |", ""),
    ],
)
def test_the_result_is_found_in_what_a_run_prints(name: str, printed: str, result: str) -> None:
    assert result_of(run_of(name), printed) == result


@pytest.mark.parametrize("name", ["harm", "pairwise"])
def test_what_keeps_its_runs_in_a_file_makes_them_again(name: str) -> None:
    """Else it would pass without a run: the file is full."""
    assert "--again" in run_of(name).command


@pytest.mark.processes
def test_a_run_that_passed_at_this_commit_is_not_repeated_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "RECORDS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(evidence, "PAGE", tmp_path / "runs.md")
    monkeypatch.setattr(evidence, "this_commit", lambda: "abc")
    monkeypatch.setattr(evidence, "package", lambda: "def")
    monkeypatch.setattr(
        evidence, "RUNS", (Run("good", "echo made", "1 s", "that"), Run("bad", "echo made; false", "1 s", "this"))
    )
    (tmp_path / "runs.md").write_text(f"before\n{evidence.BEGIN}old{evidence.END}after\n")
    for times in (1, 2):
        result = CliRunner().invoke(evidence.main, [])
        assert (result.exit_code, result.output.splitlines()[-1]) == (1, "failed: bad")
        names = [json.loads(line)["name"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        assert names == ["good", *["bad"] * times]
    page = (tmp_path / "runs.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "| abc, def, " in page
    assert "| passed |" in page
    assert "| **FAILED** |" in page
    assert "old" not in page


@pytest.mark.processes
def test_the_words_for_make_evidence_do_not_reach_the_make_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make gives its ARGS to each make below it, by two variables."""
    monkeypatch.setattr(evidence, "package", lambda: "def")
    monkeypatch.setenv("ARGS", "words")
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=words")
    makefile = tmp_path / "Makefile"
    makefile.write_text("show:\n\t@echo [$(ARGS)]\n")
    run = Run("show", f"make -f {makefile} show", "1 s", "that", {"": r"^(\[.*\])$"})
    assert evidence.run_and_record(run, "abc").result == "[]"
