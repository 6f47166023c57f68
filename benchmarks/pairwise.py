"""`python -m benchmarks.pairwise`: random pairs (NoLoCo) against rounds, at about the same bytes.

Simulated peers train the demo model, with the nodes of `p2ptrain join` in virtual time. A pairwise step
sends one encoded model, a round nearly two (outer gradients to the reducers, means to the members). Four rounds, H =
50, are eight models. With H = 30, pairs take six steps, and end with a round as well: eight models, too. Among more
peers they find their partners later, and take shorter intervals for the same bytes.

Each run is one line of `docs/evidence/pairwise.jsonl`; runs that are there are not repeated. `--report` prints
the table. 256 peers only with `--peers 256`: a run of 60 steps takes two to four minutes of a core.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from benchmarks import kept_runs
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records, as_text
from p2ptrain.simulation.swarm import simulate

# By the number of peers: inner steps, and H of rounds and of pairs, for the same bytes (measured).
# 256 peers take fewer steps: each costs two to four seconds of a core.
SCALES = {8: (200, 50, 30), 64: (200, 50, 25), 256: (60, 10, 12)}
ARMS: dict[str, dict[str, Any]] = {
    # A milder Nesterov than DiLoCo's 0.7 and 0.9, which overshoots with so few rounds.
    "parts": {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.6},
    "pairwise": {
        "averaging": "pairwise", "outer_optimizer": "sgdm", "outer_lr": 0.7, "outer_momentum": 0.5
    },
    "alone": {"outer_optimizer": "sgd", "outer_lr": 1.0},
}  # fmt: skip
RESULTS = Path(__file__).parent.parent / "docs/evidence/pairwise.jsonl"


def run(arm: str, peers: int, seed: int, scale: tuple[int, int, int] | None = None) -> dict[str, Any]:
    """One run, and what it measured."""
    steps, rounds_every, pairs_every = scale or SCALES[peers]
    every = {"parts": rounds_every, "pairwise": pairs_every, "alone": 1_000_000}[arm]
    began_s = time.process_time()
    settings = {"fragment_fraction": 0.0, "batch_size": 1, "eval_every": steps, "sync_every": every, **ARMS[arm]}
    records = simulate(Experiment.of(peers=peers, steps=steps, seed=seed, **settings))
    return {
        "arm": arm, "peers": peers, "seed": seed, **measures(records, peers),
        "cpu_s": round(time.process_time() - began_s, 1),
    }  # fmt: skip


def measures(records: Records, peers: int) -> dict[str, Any]:
    """Losses before and after the last round, megabytes that a peer sends, and of pairs how far apart peers are."""
    pairs = [event for _, event in records.of("pair")]
    spreads = [event["spread"] for event in pairs[len(pairs) // 2 :] if event["spread"] is not None]
    return {
        "loss_before": round(records.loss_before_merge, 4),
        "loss": round(records.final_loss, 4),
        "mb_per_peer": round(records.bytes_sent / 1e6 / peers, 4),
        "contributors": [len(event["contributors"]) for event in records.rounds],
        "paired": round(sum(event["status"] == "paired" for event in pairs) / len(pairs), 3) if pairs else None,
        "spread": round(statistics.fmean(spreads), 4) if spreads else None,
    }


def table(results: list[dict[str, Any]]) -> str:
    """A line for each number of peers and arm, with the mean over the seeds and half of their range."""
    rows = []
    for peers in sorted({result["peers"] for result in results}):
        for arm in ARMS:
            of = [result for result in results if (result["peers"], result["arm"]) == (peers, arm)]
            if not of:
                continue
            paired = [result["paired"] for result in of if result["paired"] is not None]
            rows.append({
                "peers": str(peers),
                "averaging": arm,
                "seeds": str(len(of)),
                "loss before": _of([result["loss_before"] for result in of]),
                "after the last round": _of([result["loss"] for result in of]),
                "MB a peer": f"{statistics.fmean(result['mb_per_peer'] for result in of):.2f}",
                "steps with a partner": f"{statistics.fmean(paired):.0%}" if paired else "-",
                "spread": f"{statistics.fmean(result['spread'] for result in of):.3f}" if paired else "-",
                "CPU s": f"{statistics.fmean(result['cpu_s'] for result in of):.0f}",
            })  # fmt: skip
    return as_text(rows)


def _of(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


@click.command("python -m benchmarks.pairwise")
@click.option(
    "--peers", multiple=True, type=click.Choice(list(map(str, SCALES))), default=("8", "64"), show_default=True
)
@click.option("--arm", multiple=True, type=click.Choice(list(ARMS)), default=list(ARMS))
@click.option("--seed", multiple=True, type=int, default=(0, 1, 2))
@click.option("--jobs", default=1, help="Runs at once, one core each.", show_default=True)
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="File of one JSON line for each run.")
@click.option("--again", is_flag=True, help="Repeat runs that are in the file.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing, and print the table.")
def main(
    peers: tuple[str, ...], arm: tuple[str, ...], seed: tuple[int, ...], jobs: int, results: Path, again: bool,
    only_report: bool,
) -> None:  # fmt: skip
    """Measure pairs against rounds, and continue where an earlier call stopped."""
    logging.getLogger("p2ptrain").setLevel(logging.ERROR)
    if not only_report:
        known = set() if again else {_cell(row) for row in kept_runs.read(results)}
        wanted = [(a, int(p), s) for p in peers for s in seed for a in arm if (a, int(p), s) not in known]
        if again:
            kept_runs.drop(results, lambda row: _cell(row) in wanted)
        # Each run sets torch's state of the process; fork would not copy its threads.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for future in as_completed([pool.submit(run, *cell) for cell in wanted]):
                kept_runs.append(results, future.result())
                click.echo(json.dumps(future.result()))
    click.echo(table(kept_runs.read(results)))


def _cell(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["arm"], row["peers"], row["seed"]


if __name__ == "__main__":
    main()
