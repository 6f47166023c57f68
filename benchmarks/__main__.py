"""`python -m benchmarks [NAME]...`: run benchmarks and print their tables."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.processes import WorkerError
from benchmarks.row import Row

BENCHMARKS = {
    "step": "peer.step() on the training thread, 124M parameters, two peers (rival: exo gym's exchange)",
    "push": "CPU of one push over all processes, and how much gossip slows training",
    "gpu": "peer.step() and its share of training: GPT-2 124M, bfloat16, compiled, two peers on one GPU",
    "round": "a round at 25M parameters, four peers (rival: hivemind's averager)",
    "bulk": "rounds at 100M and 350M parameters, two peers, beside the rate of one TLS connection",
    "bytes": "bytes of fragments and rounds, counted outside the processes",
    "memory": "memory beyond model, gradients and inner optimizer, at rest and during a round",
    "reference": "training beside SPARTA's authors' simulator: loss, bytes, time blocked (rival: exo gym's algorithm)",
    "simulate": "CPU of the simulator beside that of the bare training steps; 64 peers",
    "download": "a joiner's download on a link of 100 Mbit/s, whole and resumed (network namespaces, root)",
    "wan": "a round over wide-area links: 2, 4 and 8 peers (namespaces, root; rivals: gloo, hivemind)",
    "start": "start to first step, join to first step, with the demo model",
    "churn": "one of three peers is killed: time to the others' next round, and to its own after a restart",
}


@click.command("python -m benchmarks", epilog="Example: python -m benchmarks step round --json results.json")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(BENCHMARKS)))
@click.option("--list", "only_list", is_flag=True, help="List the benchmarks and exit.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the numbers to this file."
)
def main(names: Sequence[str], only_list: bool, json_file: Path | None) -> None:
    """Measure p2ptrain beside other programs on this machine: all benchmarks, or those named."""
    # Files and pipes have no width; do not cut rows there.
    console = Console(width=None if sys.stdout.isatty() else 180)
    if only_list:
        for name, title in BENCHMARKS.items():
            console.print(f"{name:10} {title}", highlight=False)
        return
    # SIGTERM ends the program as Ctrl-C does, so that no peer keeps running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    about = machine()
    console.print(", ".join(f"{name}: {value}" for name, value in about.items()), highlight=False)
    results: dict[str, list[Row]] = {}
    for name in names or BENCHMARKS:
        try:
            results[name] = importlib.import_module(f"benchmarks.bench_{name}").run()
        except (WorkerError, RuntimeError, OSError) as error:
            console.print(f"\n{name}: not measured: {error}", markup=False, highlight=False)
            continue
        console.print()
        console.print(_table(name, results[name]))
        console.print(f"load average after it: {os.getloadavg()[0]:.1f}", highlight=False)
    if json_file is not None:
        rows = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
        json_file.write_text(json.dumps({"machine": about, "benchmarks": rows}, indent=2) + "\n")
    sys.exit(0 if len(results) == len(names or BENCHMARKS) else 1)


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{name}: {BENCHMARKS[name]}", title_justify="left")
    for column in ("work", "must reach", "measured", "", "rival, same run"):
        table.add_column(column, overflow="fold")
    for row in rows:
        verdict = {None: "", True: "reached", False: "MISSED"}[row.reached]
        table.add_row(row.work, row.must_reach, row.measured, verdict, row.rival)
    return table


if __name__ == "__main__":
    main()
