"""Terminal output of a simulation: progress of every variant, and tables of results."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records


@contextmanager
def progress_bars(experiments: Sequence[Experiment]) -> Iterator[Callable[[int, int], None]]:
    """A bar for each experiment on stderr; occasional lines if stderr is not a terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(experiments, console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(e.name, total=e.run.total_steps) for e in experiments]
        yield lambda number, step: progress.update(tasks[number], completed=step)
        for task, experiment in zip(tasks, experiments, strict=True):
            progress.update(task, completed=experiment.run.total_steps)


def _lines(experiments: Sequence[Experiment], console: Console) -> Callable[[int, int], None]:
    printed = [0] * len(experiments)

    def show(number: int, step: int) -> None:
        experiment = experiments[number]
        tenth = 10 * step // experiment.run.total_steps
        if tenth > printed[number]:
            printed[number] = tenth
            console.print(f"{experiment.name}: step {step} of {experiment.run.total_steps}", highlight=False)

    return show


def format_table(variants: Sequence[Records]) -> str:
    """Results of all variants, a line each."""
    table = _new_table("arm", "loss before", "merged", "correlation", "rounds", "MB sent", "kB a step and peer")
    for records in variants:
        steps = records.experiment.run.total_steps
        correlations = [value for step, value in records.correlations() if step < steps]
        table.add_row(
            records.experiment.name,
            f"{records.loss_before_merge:.4f}",
            f"{records.final_loss:.4f}",
            f"{correlations[-1]:.4f}" if correlations else "-",
            str(len(records.rounds)),
            f"{records.bytes_sent / 1e6:.2f}",
            f"{records.bytes_sent / 1e3 / steps / len(records.events):.2f}",
        )
    return as_text(table)


def format_run_audits(variants: Sequence[Records]) -> str:
    """Faults and rounds of all variants, a line each."""
    table = _new_table(
        "arm", "faults", "goodput", "steps lost", "committed", "skipped", "contributors", "repairs",
        "joins", "s to first step", "hashes agree",
    )  # fmt: skip
    for records in variants:
        run_audit = records.run_audit
        joins = [join for join in run_audit.joins if join.started_s >= records.began_s]
        times = sorted(join.step_s for join in joins if join.step_s is not None)
        sizes = list(run_audit.participation.elements())
        table.add_row(
            records.experiment.name,
            str(len(records.experiment.faults_drawn)),
            f"{records.goodput:.2%}",
            str(records.steps_lost),
            str(len(run_audit.committed)),
            str(run_audit.skipped),
            f"{statistics.fmean(sizes):.2f} of {records.experiment.peers}" if sizes else "-",
            str(run_audit.repairs),
            str(len(joins)),
            f"{statistics.median(times):.1f}, most {times[-1]:.1f}" if times else "-",
            f"{run_audit.agreement:.0%}",
        )
    return as_text(table)


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def as_text(table: Table, width: int = 130) -> str:
    """A table as plain text of at most `width` columns."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
