"""Files of runs that are done, and the pages made of them: what a kill leaves is read; pages say what files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import evidence, harm, kept_runs, larger, pairwise
from benchmarks.shakespeare import report


def test_a_line_that_was_cut_off_is_left_out_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "directory/runs.jsonl"
    assert kept_runs.read(file) == []
    kept_runs.append(file, {"seed": 0})
    with file.open("a") as cut_off:
        cut_off.write('{"seed": 1, "lo')
    kept_runs.append(file, {"seed": 2})
    assert kept_runs.read(file) == [{"seed": 0}, {"seed": 2}]


def test_runs_that_are_made_again_leave_the_file_first(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    kept_runs.drop(file, lambda line: True)
    assert not file.exists()
    for seed in range(3):
        kept_runs.append(file, {"seed": seed})
    kept_runs.drop(file, lambda line: line["seed"] == 1)
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines()] == [0, 2]


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<b>\nold\n<e>\n\nafter\n")
    kept_runs.write_between(page, "<b>", "<e>", ["one", "two"])
    assert page.read_text() == "before\n\n<b>\n\none\n\ntwo\n\n<e>\n\nafter\n"
    with pytest.raises(ValueError, match="unpack"):
        kept_runs.write_between(page, "<no mark>", "<e>", [])
    assert "after" in page.read_text()


@pytest.mark.parametrize(
    ("page", "made"),
    [
        (evidence.PAGE, lambda: [evidence.table(evidence.records())]),
        (harm.PAGE, lambda: [harm.table(harm.read_results(harm.RESULTS))]),
        (evidence.PAGE.parent / "benchmarks.md", lambda: [pairwise.table(kept_runs.read(pairwise.RESULTS))]),
        (larger.PAGE, lambda: [larger.table(kept_runs.read(larger.RESULTS))]),
        (report.PAGE, lambda: report.tables(report.read(report.RESULTS))),
    ],
    ids=["runs", "harm", "pairwise", "larger", "results"],
)
def test_pages_have_what_their_records_say(page: Path, made: Callable[[], list[str]]) -> None:
    text = page.read_text(encoding="utf-8")
    for part in made():
        assert part in text
