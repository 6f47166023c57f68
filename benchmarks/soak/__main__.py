"""`python -m benchmarks.soak`: train with real peers under random faults, and report the cost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.machine import machine
from benchmarks.namespaces import why_not
from benchmarks.paced import STEP_S, STEP_VARIABLE
from benchmarks.soak.environment import prepare_environment
from benchmarks.soak.plan import CUT, KINDS, plan_faults
from benchmarks.soak.report import format_soak
from benchmarks.soak.storm import SoakError, run_soak
from benchmarks.soak.verdict import failures

# Seconds without faults: before the storm, to measure the fault-free speed; after it, for all peers to agree.
CALM_S, END_S = 90.0, 60.0


@click.command("python -m benchmarks.soak")
@click.option("--minutes", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Minutes of faults.")
@click.option("--peers", type=click.IntRange(min=3), default=4, show_default=True)
@click.option("--faults-per-minute", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--step-ms", type=click.FloatRange(min=1), help="Duration of a step.  [default: 30]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seeds the faults.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep the peers' files here.")
def main(
    minutes: float, peers: int, faults_per_minute: float, step_ms: float | None, seed: int, out: Path | None
) -> None:
    """Train with real peers under kill -9, SIGSTOP, restarts, leaving, joining and, if this machine permits network
    namespaces, partitions. Prints a table in Markdown. Exits with 1 if peers disagree on a round, if not all peers land
    the same round after the faults, or if a peer leaks memory, files, threads or disk space.
    """
    # SIGTERM ends the program as Ctrl-C does, so that no peer keeps running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    step_s = STEP_S if step_ms is None else step_ms / 1000
    os.environ[STEP_VARIABLE] = str(step_s)
    about = ", ".join(f"{name}: {value}" for name, value in machine().items())
    click.echo(about, err=True)
    if reason := why_not():
        click.echo(f"without partitions, on loopback: {reason}", err=True)
    kinds = KINDS if reason else (*KINDS, CUT)
    faults = plan_faults(seed=seed, peers=peers, minutes=minutes, per_minute=faults_per_minute, kinds=kinds)
    with TemporaryDirectory(prefix="soak-") as scratch:
        directory = out or Path(scratch)
        if directory.exists() and any(directory.iterdir()):
            raise click.UsageError(f"--out {directory}: is not empty")
        try:
            with prepare_environment(peers, machines=not reason) as environment:
                soak = run_soak(
                    directory, environment, faults, step_s=step_s, calm_s=CALM_S, storm_s=60 * minutes, end_s=END_S,
                    say=lambda text: click.echo(text, err=True),
                )  # fmt: skip
        except SoakError as error:
            click.echo(str(error), err=True)
            sys.exit(1)
    click.echo(f"{about}\n\n{format_soak(soak, seed=seed)}")
    for failure in (found := failures(soak)):
        click.echo(f"failed: {failure}", err=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
