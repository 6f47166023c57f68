"""Terminal output of a simulation: progress of every variant, and tables of results."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    rows = []
    for records in variants:
        steps = records.experiment.run.total_steps
        correlations = [value for step, value in records.correlations() if step < steps]
        rows.append(
            {
                "variant": records.experiment.name,
                "loss before": f"{records.loss_before_merge:.4f}",
                "merged": f"{records.final_loss:.4f}",
                "correlation": f"{correlations[-1]:.4f}" if correlations else "-",
                "rounds": str(len(records.rounds)),
                "MB sent": f"{records.bytes_sent / 1e6:.2f}",
                "kB a step and peer": f"{records.bytes_sent / 1e3 / steps / len(records.events):.2f}",
            }
        )
    return as_text(rows)


def format_run_audits(variants: Sequence[Records]) -> str:
    """Faults and rounds of all variants, a line each."""
    rows = []
    for records in variants:
        run_audit = records.run_audit
        joins = [join for join in run_audit.joins if join.started_s >= records.began_s]
        times = sorted(join.step_s for join in joins if join.step_s is not None)
        sizes = list(run_audit.participation.elements())
        rows.append(
            {
                "variant": records.experiment.name,
                "faults": str(len(records.experiment.faults_drawn)),
                "goodput": f"{records.goodput:.2%}",
                "steps lost": str(records.steps_lost),
                "committed": str(len(run_audit.committed)),
                "skipped": str(run_audit.skipped),
                "contributors": f"{statistics.fmean(sizes):.2f} of {records.experiment.peers}" if sizes else "-",
                "repairs": str(run_audit.repairs),
                "joins": str(len(joins)),
                "s to first step": f"{statistics.median(times):.1f}, most {times[-1]:.1f}" if times else "-",
                "hashes agree": f"{run_audit.agreement:.0%}",
            }
        )
    return as_text(rows)


def as_text(rows: Sequence[Mapping[str, str]], *, numbers: bool = True, width: int = 130) -> str:
    """A plain table of at most `width` columns, with the rows' keys as titles; `numbers` are on the right."""
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        right = numbers and table.columns
        table.add_column(column, justify="right" if right else "left", overflow="ellipsis" if numbers else "fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
