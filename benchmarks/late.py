"""`python -m benchmarks.late`: what rounds that land late cost by landing rule, and what sparse rounds save.

One process trains all peers in lockstep, without the protocol: a small character GPT, rounds every H steps with the
project's codecs and outer step. A round that is due at step t averages snapshots of step t and lands at step t + d;
the peers train on meanwhile. The next snapshot is due H steps after this one. There is no round at the last step; the
result is the held-out loss of the mean of the peers' weights, and the mean of their own losses.

`--grid late` compares the rules of `RULES` for d of 0, 2, 5 and 20 steps at H = 25, and some of them also with others;
`--grid bytes` compares SparseLoCo's rule as a gather with the project's codecs, for several H. `--text` names the
corpus, which is not part of the project.
Each run is appended to `--results` at once; runs that are there are not repeated. One file holds results of one text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import click
import torch

from benchmarks import kept_runs
from benchmarks.late_rules import ON_TIME, RULES
from benchmarks.late_training import CONTEXT, Cell, Result, Setup, run_config, simulate
from benchmarks.machine import machine
from p2ptrain.errors import ConfigError
from p2ptrain.training.data import Characters, Corpus, load_corpus
from p2ptrain.training.partitioning import Partition, make_partition

RESULTS = Path(__file__).parent.parent / "docs/evidence/late.jsonl"
OPTIMIZERS, SEEDS = ("muon", "adamw"), (0, 1, 2)
CODECS, INTERVALS = ("int4", "int2", "topk", "sparse64", "sparse128"), (25, 50, 10, 5)
# So many words name a setting in which nothing differs from the usual one.
USUAL = 3
# The largest rate of AdamW that was tried, and the best.
FASTER = 1.2e-2
SECTIONS, LARGER = "5 sections in turn", "outer 1.0 / 0.6"
# Each optimizer with its best rate of those tried.
TUNED = (("muon", None), ("adamw", FASTER))
# A long run, and how many of its steps fit into its time if peers wait 20 steps for each round after 25.
LONG, WAITING = 2000, 2000 * 25 // 45
# For peers that are late by different times: rules that use each peer's own, and those that did best.
SPREAD = ("add", SECTIONS, "dc-asgd 0.1", "damped 0.75", "heloco", "net", "mix 0.5", LARGER)


@functools.cache
def _corpus(text: Path) -> Corpus:
    return load_corpus(str(text), Characters())


@functools.cache
def _partition(text: Path, peers: int, shards: str, seed: int) -> Partition | None:
    """The shares; clusters take ten seconds, so they are kept for the next run of this process."""
    run = run_config(Cell("late", "add", 0, "adamw", peers, shards, seed), Setup())
    return make_partition(run, _corpus(text), context=CONTEXT, device=torch.device("cpu"))


def measure(cell: Cell, text: Path, setup: Setup) -> Result:
    """One run, as a line of the results."""
    torch.set_num_threads(1)
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    partition = _partition(text, cell.peers, cell.shards, cell.seed)
    result = simulate(cell, _corpus(text), partition, setup)
    return {
        **dataclasses.asdict(cell),
        **result,
        **{name: value for name, value in machine().items() if name in ("date", "package", "cpu", "torch")},
        "seconds": round(time.perf_counter() - began_s, 1),
        "cpu_s": round(time.process_time() - cpu_began_s, 1),
    }


def cells(grid: str) -> Iterator[Cell]:
    """All runs of a grid, the most informative ones first."""
    if grid == "bytes":
        for seed, interval, name, optimizer in itertools.product(SEEDS, INTERVALS, CODECS, OPTIMIZERS):
            if (name, interval) != ("int4", 25):  # in the other grid
                yield Cell("bytes", "add", 0, optimizer, 4, "iid", seed, name, interval)
        for seed, name, interval in itertools.product(SEEDS, CODECS, INTERVALS):
            if (name, interval) != ("int4", 25):
                yield Cell("bytes", "add", 0, "adamw", 4, "iid", seed, name, interval, lr=FASTER)
        return
    for peers, shards, delays in (
        (4, "iid", (0, 20)), (4, "iid", (5, 2)), (4, "clusters", (0, 20, 5)), (8, "iid", (0, 20, 5)),
        (8, "clusters", (0, 20, 5)),
    ):  # fmt: skip
        for seed, delay, optimizer, rule in itertools.product(SEEDS, delays, OPTIMIZERS, RULES):
            # Most rules are `add` if the round is on time.
            if delay or rule == "add" or rule in ON_TIME:
                yield Cell("late", rule, delay, optimizer, peers, shards, seed)
    yield from itertools.chain.from_iterable(map(_in_other_settings, SEEDS))


def _in_other_settings(seed: int) -> Iterator[Cell]:
    """AdamW with larger rates, peers as far apart as with a late round, an end that is soon after each landing, int2
    with a larger outer step, sections that are as late as the whole, longer intervals in longer runs, peers that are
    late by different times, and long runs beside one peer alone, data parallel, and peers that wait."""
    cell = functools.partial(Cell, "late", peers=4, shards="iid", seed=seed)
    for lr, rule, delay in itertools.product((6e-3, FASTER), ("add", SECTIONS, LARGER), (0, 20)):
        yield cell(rule, delay, "adamw", lr=lr)
    yield cell("add", 0, "muon", sync_every=45)
    for optimizer, rule, delay in itertools.product(OPTIMIZERS, ("add", SECTIONS), (0, 20)):
        yield cell(rule, delay, optimizer, steps=580)
    for sync_every, rule in itertools.product((25, 10), ("add", LARGER)):
        yield cell(rule, 0, "adamw", codec="int2", sync_every=sync_every)
    yield cell(SECTIONS, 100, "muon")
    for sync_every, delay in itertools.product((50, 100, 200), (20, 0)):
        yield cell("add", delay, "muon", sync_every=sync_every, steps=LONG)
    for rule, (optimizer, rate) in itertools.product(SPREAD, TUNED):
        yield cell(rule, 20, optimizer, lr=rate, spread=True)
        if rule == "add":
            yield cell(rule, 10, optimizer, lr=rate)
    for optimizer, rate in TUNED:
        tuned = functools.partial(cell, optimizer=optimizer, lr=rate)
        for rule, delay in itertools.product(("add", SECTIONS), (20, 0)):
            yield tuned(rule, delay, steps=LONG)
        yield tuned("add", 0, steps=WAITING)
        for batch_size in (None, 4 * Setup.batch_size):
            yield tuned("add", 0, peers=1, sync_every=LONG, steps=LONG, batch_size=batch_size)


def read_results(path: Path) -> dict[Cell, Result]:
    """The runs in a file, each once: the last counts."""
    found: dict[Cell, Result] = {}
    for row in kept_runs.read(path):
        # Lines from before a setting could be chosen do not have it.
        cell = Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell) if field.name in row})
        found[cell] = {**dataclasses.asdict(cell), **row}
    return found


def table(results: dict[Cell, Result], grid: str) -> str:
    """The report in Markdown: mean ± half of the range over the seeds, and their number; only what was run.

    For late rounds also what they cost against `add` on time with the same seeds, the cheapest rule first.
    """
    return _bytes_table(results) if grid == "bytes" else _late_tables(results)


def _late_tables(results: dict[Cell, Result]) -> str:
    """A table for each choice of peers, shards and optimizer, and one for all in other settings."""
    rows = [row for cell, row in results.items() if cell.grid == "late"]
    parts: list[list[dict[str, str]]] = []
    others: list[dict[str, str]] = []
    for setting in sorted({_setting(row) for row in rows}, key=lambda names: (len(names), names)):
        of, title = [row for row in rows if _setting(row) == setting], ", ".join(setting)
        together = _setting({**of[0], "spread": False})
        on_time = [row for row in rows if (row["rule"], row["delay"], _setting(row)) == ("add", 0, together)]
        base = {row["seed"]: row["loss"] for row in on_time}
        lines = []
        for rule in RULES:
            costs: dict[int, str] = {}
            order = math.inf
            for delay in sorted({row["delay"] for row in of}):
                chosen = [row for row in of if (row["rule"], row["delay"]) == (rule, delay)]
                extra = [row["loss"] - base[row["seed"]] for row in chosen if row["loss"] and base.get(row["seed"])]
                order = statistics.fmean(extra) if extra else math.inf
                costs[delay] = _shown([row["loss"] for row in chosen]) + (f" ({order:+.3f})" if extra else "")
            if set(costs.values()) != {"–"}:
                if 0 in costs and rule != "add" and rule not in ON_TIME:
                    costs[0] = "as `add`"
                lines.append((order, rule, costs))
        lines.sort(key=lambda line: line[0])
        if len(setting) == USUAL:
            parts.append([
                {title: rule, **{f"d = {delay}": cost for delay, cost in costs.items()}} for _, rule, costs in lines
            ])  # fmt: skip
        else:
            others += [
                {"other settings": f"{title}: {rule}", "d": str(delay), "loss": cost}
                for _, rule, costs in lines for delay, cost in costs.items() if cost != "–"
            ]  # fmt: skip
    return "\n\n".join(_markdown(lines) for lines in [*parts, others] if lines)


def _setting(row: Result) -> tuple[str, ...]:
    """What the runs of one table share: peers, shards and optimizer, and all that differs from the usual setting."""
    usual = Cell("late", "add", 0, "adamw", 4, "iid", 0)
    return (
        f"{row['peers']} peers" if row["peers"] > 1 else "1 peer", row["shards"], row["optimizer"],
        *([] if row["codec"] == usual.codec else [row["codec"]]),
        *([] if row["sync_every"] == usual.sync_every else [f"H = {row['sync_every']}"]),
        *([] if row["lr"] is None else [f"lr {row['lr']:g}"]),
        *([] if row["steps"] is None else [f"{row['steps']} steps"]),
        *([] if row["delay"] <= row["sync_every"] else ["a section as late as the whole"]),
        *(["peers late by 0 to d"] if row["spread"] else []),
        *([] if row["batch_size"] is None else [f"batch {row['batch_size']}"]),
    )  # fmt: skip


def _bytes_table(results: dict[Cell, Result]) -> str:
    rows = [row for cell, row in results.items() if cell.grid == "bytes" or _is_usual(cell)]
    lines = []
    for lr, name, interval in itertools.product((None, FASTER), CODECS, sorted(INTERVALS)):
        of = [row for row in rows if (row["lr"], row["codec"], row["sync_every"]) == (lr, name, interval)]
        if of:
            line = {
                "codec": name if lr is None else f"{name}, lr {lr:g}",
                "H": str(interval),
                "MB": f"{statistics.fmean(row['mb'] for row in of if row['mb']):.2f}",
            }
            for optimizer in OPTIMIZERS:
                line[optimizer] = _shown([row["loss"] for row in of if row["optimizer"] == optimizer])
            lines.append(line)
    return _markdown(lines)


def _is_usual(cell: Cell) -> bool:
    """Whether a run of the other grid belongs to both: `add` on time, with int4 and H = 25, at either rate."""
    usual = Cell("late", "add", 0, cell.optimizer, 4, "iid", cell.seed, lr=cell.lr)
    return cell == usual and cell.lr in (None, FASTER)


def _markdown(lines: Sequence[dict[str, str]]) -> str:
    if not lines:
        return ""
    rows = [[*lines[0]], ["---"] * len(lines[0]), *([*line.values()] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return "diverged"
    if len(known) < 2:
        return f"{known[0]:.3f}" if known else "–"
    return f"{statistics.fmean(known):.3f} ± {(max(known) - min(known)) / 2:.3f} of {len(known)}"


def run_all(wanted: Sequence[Cell], text: Path, results: Path, jobs: int, seconds: float, setup: Setup) -> None:
    """Measure cells in this order, several at once, and begin none after `seconds`."""
    deadline_s, queue, running = time.monotonic() + seconds, iter(wanted), set[Future[Result]]()
    # Each run sets torch's state of the process; fork would not copy its threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(running) < jobs and time.monotonic() < deadline_s and (cell := next(queue, None)):
                running.add(pool.submit(measure, cell, text, setup))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                kept_runs.append(results, future.result())
                click.echo(json.dumps(future.result()))


@click.command("python -m benchmarks.late")
@click.option("--grid", type=click.Choice(["late", "bytes"]), default="late", show_default=True)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text file to train on.")
@click.option(
    "--results",
    default=RESULTS,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of one JSON line for each run; without it, those of docs/evidence/late.md.",
)
@click.option("--rule", multiple=True, type=click.Choice(list(RULES)), help="Only these rules; may be repeated.")
@click.option("--jobs", default=1, type=click.IntRange(1), help="Runs at once, one core each.", show_default=True)
@click.option("--seconds", default=math.inf, help="Seconds after which no new run starts.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing, and print the table.")
def main(
    grid: str, text: Path | None, results: Path, rule: tuple[str, ...], jobs: int, seconds: float, only_report: bool
) -> None:
    """Measure the runs of a grid, and continue where an earlier call stopped."""
    done = read_results(results)
    if only_report:
        if not any(cell.grid == grid for cell in done):
            raise click.UsageError(f"{results} has no runs of the grid {grid!r}")
        click.echo(table(done, grid))
        return
    if text is None:
        raise click.UsageError("--text is required to train; give a text file")
    try:
        _corpus(text)
        results.open("ab").close()
    except (ConfigError, OSError) as error:
        raise click.UsageError(str(error)) from None
    wanted = [cell for cell in cells(grid) if cell not in done and (not rule or cell.rule in rule)]
    click.echo(f"{len(wanted)} runs")
    run_all(wanted, text, results, jobs, seconds, Setup())


if __name__ == "__main__":
    main()
