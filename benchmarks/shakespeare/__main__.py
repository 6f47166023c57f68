"""`python -m benchmarks.shakespeare --text FILE`: run what is missing, one by one, and write docs/evidence/results.md.

Each run is one line of docs/evidence/results/shakespeare.jsonl. Runs that are there are not repeated. After a change
of what rounds or fragments do, remove the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import kept_runs
from benchmarks.machine import machine
from benchmarks.processes import WorkerError
from benchmarks.shakespeare import data_parallel, peers, simulated
from benchmarks.shakespeare.cells import PARALLEL, SEEDS, SIMULATED, Cell, stages
from benchmarks.shakespeare.data import prepare
from benchmarks.shakespeare.report import RESULTS, read, report, tables
from p2ptrain.demo.orchestrator import DemoFailedError
from p2ptrain.errors import ConfigError


@click.command("python -m benchmarks.shakespeare")
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="tinyshakespeare's input.txt."
)
@click.option("--work", default="p2ptrain-results", type=click.Path(path_type=Path), help="Directory for the runs.")
@click.option("--stage", multiple=True, type=int, help="1 to 11, in the order of the page; may be repeated.")
@click.option("--seed", multiple=True, type=int, default=SEEDS, help="May be repeated.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="File of one JSON line for each run.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing: print the tables, and write the page.")
def main(
    text: Path | None, work: Path, stage: Sequence[int], seed: Sequence[int], results: Path, only_report: bool
) -> None:
    """Measure all runs of docs/evidence/results.md, and continue where an earlier call stopped."""
    failed = 0
    if not only_report:
        if text is None:
            raise click.UsageError("give --text FILE, tinyshakespeare's input.txt (nanoGPT's prepare.py downloads it)")
        try:
            data = prepare(text, work / "data")
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        for number, cells in stages():
            for cell in cells:
                if (not stage or number in stage) and cell.seed in seed and cell not in read(results):
                    failed += not _measure(cell, data, work / cell.name, results)
                    _report(results)
    _report(results)
    click.echo("\n\n".join(tables(read(results))))
    if failed:
        raise click.ClickException(f"{failed} runs failed; the same command tries them again")


def _report(results: Path) -> None:
    """Write the page and its pictures, if these are its results."""
    if results == RESULTS:
        report(read(results))


def _measure(cell: Cell, data: Path, out: Path, results: Path) -> bool:
    """Run a cell, and append what it measured. Returns whether that succeeded."""
    shutil.rmtree(out, ignore_errors=True)
    before = os.getloadavg()[0]
    click.echo(f"{cell.name} … ", nl=False)
    try:
        measured = {PARALLEL: data_parallel, SIMULATED: simulated}.get(cell.arm, peers).run(cell, data, out)
    except (peers.RunFailedError, DemoFailedError, WorkerError) as error:
        click.echo(f"failed: {error}")
        return False
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    kept_runs.append(results, {**dataclasses.asdict(cell), **measured, "load": load, "machine": machine()})
    click.echo(json.dumps({name: measured[name] for name in ("loss", "mb_per_peer", "seconds")}))
    return True


if __name__ == "__main__":
    main()
