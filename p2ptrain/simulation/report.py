"""What a simulation tells in the terminal: progress of every arm, and a table of the outcomes."""

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
    """A bar for each experiment on stderr, or a line now and then where that is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(experiments, console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(e.name, total=e.run.total_steps) for e in experiments]
        yield lambda arm, step: progress.update(tasks[arm], completed=step)
        for task, experiment in zip(tasks, experiments, strict=True):
            progress.update(task, completed=experiment.run.total_steps)


def _lines(experiments: Sequence[Experiment], console: Console) -> Callable[[int, int], None]:
    told = [0] * len(experiments)

    def tell(arm: int, step: int) -> None:
        tenth = 10 * step // experiments[arm].run.total_steps
        if tenth > told[arm]:
            told[arm] = tenth
            total = experiments[arm].run.total_steps
            console.print(f"{experiments[arm].name}: step {step} of {total}", highlight=False)

    return tell


def format_table(arms: Sequence[Records]) -> str:
    """Outcomes of all arms, a line each."""
    table = Table(box=None, pad_edge=False)
    for column in ("arm", "loss before", "merged", "correlation", "rounds", "MB sent", "kB a step and peer"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in arms:
        steps = arm.experiment.run.total_steps
        correlations = [value for step, value in arm.correlations() if step < steps]
        table.add_row(
            arm.experiment.name,
            f"{arm.loss_before_merge:.4f}",
            f"{arm.final_loss:.4f}",
            f"{correlations[-1]:.4f}" if correlations else "-",
            str(len(arm.rounds)),
            f"{arm.bytes_sent / 1e6:.2f}",
            f"{arm.bytes_sent / 1e3 / steps / len(arm.events):.2f}",
        )
    return _text(table)


def format_run_audits(arms: Sequence[Records]) -> str:
    """What all arms came through, a line each."""
    table = Table(box=None, pad_edge=False)
    for column in (
        "arm", "faults", "goodput", "steps lost", "committed", "skipped", "contributors", "repairs",
        "joins", "s to first step", "hashes agree",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in arms:
        run_audit = arm.run_audit
        joins = [join for join in run_audit.joins if join.started_s >= arm.began_s]
        times = sorted(join.step_s for join in joins if join.step_s is not None)
        sizes = list(run_audit.participation.elements())
        table.add_row(
            arm.experiment.name,
            str(len(arm.experiment.storm)),
            f"{arm.goodput:.2%}",
            str(arm.steps_lost),
            str(len(run_audit.committed)),
            str(run_audit.skipped),
            f"{statistics.fmean(sizes):.2f} of {arm.experiment.peers}" if sizes else "-",
            str(run_audit.repairs),
            str(len(joins)),
            f"{statistics.median(times):.1f}, most {times[-1]:.1f}" if times else "-",
            f"{run_audit.agreement:.0%}",
        )
    return _text(table)


def _text(table: Table) -> str:
    console = Console(width=130)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
