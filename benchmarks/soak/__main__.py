"""`python -m benchmarks.soak`: real peers under a random storm, and what it cost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.paced import STEP_VARIABLE
from benchmarks.results import machine
from benchmarks.soak.plan import plan_faults
from benchmarks.soak.report import format_soak
from benchmarks.soak.storm import SoakError, run_soak

# Before the storm: what a fault-free run does on this machine. After it: time for all to agree.
CALM_S, END_S = 90.0, 60.0


@click.command("python -m benchmarks.soak")
@click.option("--minutes", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Of storm.")
@click.option("--peers", type=click.IntRange(min=3), default=4, show_default=True)
@click.option("--faults-per-minute", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--step-ms", type=click.FloatRange(min=1), help="Of the demo model's steps.  [default: 30]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the faults.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep the peers' files here.")
def main(
    minutes: float, peers: int, faults_per_minute: float, step_ms: float | None, seed: int, out: Path | None
) -> None:
    """Train with real peers under kill -9, SIGSTOP, restarts, leaving and joining; ends with a table in Markdown."""
    # End as Ctrl-C does, so that no peer is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if step_ms is not None:
        os.environ[STEP_VARIABLE] = str(step_ms / 1000)
    about = ", ".join(f"{name}: {value}" for name, value in machine().items())
    click.echo(about, err=True)
    faults = plan_faults(seed=seed, peers=peers, minutes=minutes, per_minute=faults_per_minute)
    with TemporaryDirectory(prefix="soak-") as scratch:
        directory = out or Path(scratch)
        if directory.exists() and any(directory.iterdir()):
            raise click.UsageError(f"--out {directory}: is not empty")
        try:
            soak = run_soak(
                directory, peers, faults, calm_s=CALM_S, storm_s=60 * minutes, end_s=END_S,
                say=lambda text: click.echo(text, err=True),
            )  # fmt: skip
        except SoakError as error:
            click.echo(str(error), err=True)
            sys.exit(1)
    click.echo(f"{about}\n\n{format_soak(soak, seed=seed)}")
    sys.exit(0 if soak.account.agreement == 1.0 and soak.account.committed else 1)


if __name__ == "__main__":
    main()
