"""`python -m benchmarks.evidence`: makes the long runs that check what the docs promise, and the table of them.

Each run is one line of `docs/evidence/runs.jsonl`. A run that passed at this commit is not repeated, so the list can be
stopped at any time and continued. `docs/evidence/runs.md` has the last line of each run.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click
import psutil

from benchmarks import kept_runs
from benchmarks.machine import ROOT, git, machine, package

RECORDS = ROOT / "docs/evidence/runs.jsonl"
PAGE = ROOT / "docs/evidence/runs.md"
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
# With these, `make` below `make evidence ARGS=…` would take the same ARGS.
OF_MAKE = {"ARGS", "MAKEFLAGS", "MAKEOVERRIDES"}
# How often the load of the machine is read, for its range.
LOOK_S = 20.0


@dataclass(frozen=True)
class Run:
    """One of the runs.

    Attributes:
        name: on the command line, and in the records.
        command: run in the root of the repository.
        takes: about, on two calm cores.
        holds: what it shows, with a link to the page that promises it, relative to `docs/evidence`.
        result: regular expressions of one group by what the group is; what they match is the result.
    """

    name: str
    command: str
    takes: str
    holds: str
    result: Mapping[str, str] = field(default_factory=dict)


PASSED = {"": r"=+ (.*\d+ passed(?:, \d+ (?!warning)\w+)*).* in [\d.]+s"}
RUNS = (
    Run("test", "make test", "20 min", "every rule that a change must keep", PASSED),
    Run("test-long", "make test-long", "1 h", "tests that are too slow for every change", PASSED),
    Run(
        "models",
        "make models",
        "5 min",
        "[models that train, and models refused](../use/api.md#what-happens-to-your-tensors)",
        PASSED,
    ),
    Run(
        "pythons",
        "make pythons",
        "20 min",
        "each Python from 3.11 to 3.14 that the machine has",
        {"": r"^(Python [\d.]+) .*: installed"},
    ),
    Run(
        "compose-test",
        "make compose-test",
        "30 min",
        "[the compose demo](../use/compose.md)",
        {"": r"passed: (\d+ checks)"},
    ),
    Run(
        "hostile",
        "make hostile",
        "6 min",
        "[liars among real peers](../understand/security.md)",
        {"": r"^\d+ of \d+: .*?: (.+)$"},
    ),
    Run(
        "fuzz",
        "make fuzz",
        "40 min",
        "[bytes from strangers](../understand/security.md)",
        {"": r"(no exception but .*)"},
    ),
    Run("links", "make links", "20 min", "[slow and cut links](../understand/reliability.md#slow-links-cut-links-nat)"),
    Run(
        "soak",
        "make soak MINUTES=60",
        "65 min",
        "[kills, pauses, cuts and restarts](../understand/reliability.md#the-soak)",
        {"goodput": r"goodput.*\| ([\d.]+%) \|", "training blocked": r"blocked the training.*\| ([\d.]+%) \|"},
    ),
    Run("storms", "make storms", "40 min", "[500 storms in virtual time](../understand/reliability.md)", PASSED),
    *(
        Run(name, f'make bench ARGS="{of}"', takes, f"[{what}](benchmarks.md#{place})", {"": r"\b(reached|MISSED)\b"})
        for name, of, takes, what, place in (
            ("bench", "step push round bulk bytes memory", "1 h", "speed, bytes and memory", "on-one-machine"),
            ("bench-far", "wan", "80 min", "rounds over wide-area links", "far-apart"),
            ("bench-churn", "start churn download", "40 min", "starts, leaves, joins", "when-peers-leave-and-join"),
            ("bench-simulate", "simulate reference", "30 min", "the simulator, and the authors'", "the-simulator"),
        )
    ),
    Run(
        "harm",
        "make harm ARGS=--again",
        "1 h",
        "[what lying members cost](../understand/security.md)",
        {"": r"^(\d+ runs)$"},
    ),
    Run("thousand", "make thousand", "45 min", "[large swarms](benchmarks.md#large-swarms)"),
    Run(
        "pairwise", "make pairwise ARGS=--again", "20 min", "[random pairs](benchmarks.md#random-pairs-against-rounds)"
    ),
    Run(
        "reproduce",
        "make reproduce",
        "40 min",
        "[the papers' experiments](reproduction.md)",
        {"": r"\b(does not hold|holds|within noise)\b"},
    ),
)


@dataclass(frozen=True)
class Record:
    """A run as it went. Times are UTC; `load` is the lowest and the highest load average while it ran.

    Runs with equal `package`, git's hash of the directory `p2ptrain`, ran the same package.
    """

    name: str
    commit: str
    package: str
    began: str
    minutes: float
    load: Sequence[float]
    machine: str
    passed: bool
    result: str


def records() -> list[Record]:
    """All runs so far, the oldest first."""
    return [Record(**line) for line in kept_runs.read(RECORDS)]


def this_commit() -> str:
    """The last commit that changed more than pages and records. Exits if more than these has changed since."""
    code = (".", ":!*.md", ":!docs/evidence", ":!docs/understand/security")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    # Runs leave files of their own; code and settings that git does not know would change them.
    unknown = git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.ini", "*.cfg", "*.toml")
    if changed or unknown:
        sys.exit("\n".join(["commit these first, so that a run can be repeated:", *filter(None, [changed, unknown])]))
    return git("log", "-1", "--format=%h", "--abbrev=7", "--", *code)


def run_and_record(run: Run, commit: str) -> Record:
    """Make a run; what it prints goes to the terminal, too."""
    began, loads, ended = datetime.datetime.now(datetime.UTC), [os.getloadavg()[0]], threading.Event()

    def watch_load() -> None:
        while not ended.wait(LOOK_S):
            loads.append(os.getloadavg()[0])

    watch = threading.Thread(target=watch_load, daemon=True)
    watch.start()
    lines: list[str] = []
    with subprocess.Popen(
        run.command,
        shell=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                sys.stdout.write(line)
                sys.stdout.flush()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # all of it: the next run would be beside the rest
            raise
    ended.set()
    of = machine()
    return Record(
        name=run.name,
        commit=commit,
        package=package(),
        began=began.strftime("%Y-%m-%d %H:%M"),
        minutes=round((datetime.datetime.now(datetime.UTC) - began).total_seconds() / 60, 1),
        load=[round(min(loads), 1), round(max(loads), 1)],
        machine=f"{of['cores']} × {of['cpu']}, {psutil.virtual_memory().total / 2**30:.0f} GB",
        passed=process.returncode == 0,
        result=result_of(run, "".join(lines)),
    )


def result_of(run: Run, printed: str) -> str:
    """The results that the run's expressions find; equal ones are counted."""
    found = []
    for what, pattern in run.result.items():
        for text, times in collections.Counter(re.findall(pattern, printed, re.MULTILINE)).items():
            found.append(" ".join(filter(None, [what, f"{times} ×" if times > 1 else "", text])))
    return ", ".join(found)


def table(done: Sequence[Record]) -> str:
    """The page's table: the last record of each run, and a line for those that were never made."""
    last = {record.name: record for record in done}
    rows = [
        "| command | takes | what it shows | commit, package, machine | when (UTC), load | result |",
        "|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        if (of := last.get(run.name)) is None:
            when, commit, result = "–", "–", "not since these records began"
        else:
            low, high = of.load
            when = f"{of.began}, {of.minutes:.0f} min, {low:g} to {high:g}"
            commit = f"{of.commit}, {of.package}, {of.machine}"
            result = "; ".join(filter(None, ["passed" if of.passed else "**FAILED**", of.result]))
        rows.append(f"| `{run.command}` | {run.takes} | {run.holds} | {commit} | {when} | {result} |")
    return "\n".join(rows)


@click.command("python -m benchmarks.evidence")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice([run.name for run in RUNS]))
@click.option("--report", is_flag=True, help="Write docs/evidence/runs.md only.")
@click.option("--list", "only_list", is_flag=True, help="List the runs and exit.")
def main(names: Sequence[str], report: bool, only_list: bool) -> None:
    """Make all runs, or those named, that have not passed at this commit, one after the other: some 8 hours."""
    # SIGTERM ends the program as Ctrl-C does, so that no run keeps running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if only_list:
        for run in RUNS:
            click.echo(f"{run.name:14}{run.takes:>8}  {run.command}")
        return
    failed = []
    if not report:
        for run in RUNS:
            if names and run.name not in names:
                continue
            commit = this_commit()
            if any((of.name, of.commit, of.passed) == (run.name, commit, True) for of in records()):
                click.echo(f"{run.name}: passed at {commit}, not repeated")
            else:
                click.echo(f"\n{run.command} (about {run.takes})")
                record = run_and_record(run, commit)
                if this_commit() != commit:
                    sys.exit("the code has changed during the run, whose result is not recorded")
                kept_runs.append(RECORDS, dataclasses.asdict(record))
                failed += [] if record.passed else [run.name]
                kept_runs.write_between(PAGE, BEGIN, END, [table(records())])
    kept_runs.write_between(PAGE, BEGIN, END, [table(records())])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
