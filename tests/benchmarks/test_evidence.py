"""The table of long runs: what of a run's output is its result, and which runs are made again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks import evidence, machine
from benchmarks.evidence import RUNS, Run, result_of
from benchmarks.machine import git


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
        evidence, "RUNS", (Run("good", "echo made", "1 s", "that"), Run("bad", "echo made; exit 2", "1 s", "this"))
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


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a package and a page, each committed, as the one that is measured."""
    for of in (machine, evidence):
        monkeypatch.setattr(of, "ROOT", tmp_path)
    for name, value in (("RECORDS", "docs/evidence/runs.jsonl"), ("PAGE", "docs/evidence/runs.md")):
        monkeypatch.setattr(evidence, name, tmp_path / value)
    git("init", "--quiet")
    for file, text in (("p2ptrain/a.py", ""), ("docs/evidence/runs.md", f"{evidence.BEGIN}{evidence.END}")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        commit(file)
    return tmp_path


def commit(file: str) -> str:
    git("add", file)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", file)
    return git("log", "-1", "--format=%h", "--abbrev=7")


@pytest.mark.processes
def test_a_run_has_the_commit_and_the_package_of_the_code(repository: Path) -> None:
    first, package = evidence.this_commit(), machine.package()
    (repository / "docs/evidence/runs.md").write_text("other words")
    assert (evidence.this_commit(), machine.package()) == (first, package)
    commit("docs/evidence/runs.md")
    assert (evidence.this_commit(), machine.package()) == (first, package)
    (repository / "p2ptrain/a.py").write_text("changed")
    assert machine.package() == package + "+"
    with pytest.raises(SystemExit, match=r"commit these first.*\n.*a\.py"):
        evidence.this_commit()
    second = commit("p2ptrain/a.py")
    assert evidence.this_commit() == second
    assert package not in (machine.package(), "")
    (repository / "conftest.py").write_text("")
    with pytest.raises(SystemExit, match=r"commit these first.*\n.*conftest\.py"):
        evidence.this_commit()


@pytest.mark.processes
def test_a_run_during_which_the_code_changed_is_not_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RUNS", (Run("changes", "echo >> p2ptrain/a.py", "1 s", "that"),))
    result = CliRunner().invoke(evidence.main, [])
    assert result.exit_code == 1
    assert "commit these first" in str(result.output)
    assert not evidence.RECORDS.exists()


@pytest.mark.processes
def test_a_run_ends_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout", Interrupted())
    run = Run("long", f"echo $$ > {tmp_path}/id; echo begun; exec sleep 600", "1 h", "that")
    with pytest.raises(KeyboardInterrupt):
        evidence.run_and_record(run, "abc")
    assert not psutil.pid_exists(int((tmp_path / "id").read_text()))


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
