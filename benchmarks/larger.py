"""`python -m benchmarks.larger`: one peer, four peers and data parallel with 10.5M parameters and a BPE; one seed.

The text is Python's own library, which every reader has: `.py` files in the order of their paths, without tests and
installed packages. All arms are simulated (virtual time, one process), so that the load of the machine changes nothing.
Each is one line of docs/evidence/results/larger.jsonl; those that are there are not repeated.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from torch import nn

from benchmarks import kept_runs
from benchmarks.machine import machine
from benchmarks.shakespeare.cells import NANOGPT, OUTER, PEERS
from benchmarks.shakespeare.data import held_out_loss
from benchmarks.shakespeare.events import measures
from benchmarks.shakespeare.report import EVIDENCE, PAGE, data_parallel_mb
from benchmarks.shakespeare.simulated import LATENCY_S, STEP_S
from p2ptrain.settings.config import resolve_run
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.swarm import simulate
from p2ptrain.training.data.meta import META_FILE
from p2ptrain.training.data.prepare import prepare
from p2ptrain.training.data.tokenizer import IDS
from p2ptrain.training.models import Llama, LlamaConfig

VOCABULARY = 4096
MODEL = "benchmarks.larger:llama_10m"
RESULTS = EVIDENCE / "results" / "larger.jsonl"
BEGIN, END = "<!-- made by python -m benchmarks.larger -->", "<!-- end of what benchmarks.larger makes -->"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# By the name of an arm: peers, and windows of each in a step as a multiple of `Size.batch`. What one of four peers has
# alone; the four; and the same tokens in one process, with the mean gradient at every step.
ARMS = {"one peer": (1, 1), "four peers, simulated": (PEERS, 1), "data parallel, in one process": (1, PEERS)}


@dataclass(frozen=True)
class Size:
    """How long and with what is trained. The defaults are what an hour of a shared core allows."""

    steps: int = 100
    # Four rounds.
    sync_every: int = 25
    batch: int = 2
    megabytes: float = 4.0
    warmup_steps: int = 20
    # Spread over the held-out text.
    eval_windows: int = 200
    model: str = MODEL


def llama_10m() -> nn.Module:
    """10.5M parameters, 1.3M of them in the table of tokens."""
    return Llama(LlamaConfig(vocab_size=VOCABULARY, layers=8, heads=5, width=320, hidden=768, context=128))


def library_text(megabytes: float, root: Path | None = None) -> str:
    """The first files of Python's library, in the order of their paths."""
    root = root or Path(sysconfig.get_path("stdlib"))
    # These are written for each installation.
    paths = sorted(
        path for path in root.rglob("*.py")
        if not SKIPPED & set(path.relative_to(root).parts)
        and not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata"))
    )  # fmt: skip
    parts, size = [], 0
    for path in paths:
        if size < megabytes * 1e6:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1].encode())
    return "\n".join(parts)


def experiment(arm: str, size: Size, data: Path) -> Experiment:
    """The simulation of an arm."""
    peers, share = ARMS[arm]
    rounds = (
        {"sync_every": size.sync_every, "round_codec": "int8", "fragment_fraction": 0.005, **OUTER}
        if peers > 1
        # One round at the end, which leaves the weights as they are.
        else {"sync_every": size.steps, "round_codec": "none", "fragment_fraction": 0.0}
    )
    given = {
        "run_id": "larger", "model": size.model, "tokenizer": IDS, "vocab_size": VOCABULARY, "total_steps": size.steps,
        **NANOGPT, "warmup_steps": size.warmup_steps, **rounds,
    }  # fmt: skip
    return Experiment(
        run=resolve_run(given, None), name=arm, peers=peers, data=str(data), batch_size=size.batch * share,
        eval_every=max(1, size.steps // 4), step_s=STEP_S, latency_s=LATENCY_S,
    )  # fmt: skip


def run(arm: str, size: Size, data: Path) -> dict[str, Any]:
    """Simulate an arm. `seconds` are of a core."""
    losses: list[float] = []

    def evaluate(models: Sequence[nn.Module]) -> None:
        losses.extend(held_out_loss(model, data, size.eval_windows, VOCABULARY) for model in models)

    began_s = time.process_time()
    simulation = experiment(arm, size, data)
    records = simulate(simulation, on_end=evaluate)
    _, start = next(records.of("start"))
    found = measures(list(records.events.values()), records.began_s, simulation.eval_every)
    return {
        "arm": arm, **asdict(size), **found, "parameters": start["parameters"],
        "loss": round(statistics.fmean(losses), 4), "losses": [round(loss, 4) for loss in losses],
        "seconds": round(time.process_time() - began_s, 1),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each arm that is done."""
    lines = ["| | steps | H | batch | tokens | loss | perplexity | MB a peer |", "|---|---|---|---|---|---|---|---|"]
    by_size = sorted(rows, key=lambda row: (row["steps"], row["sync_every"], row["batch"], [*ARMS].index(row["arm"])))
    for row in by_size:
        peers, share = ARMS[row["arm"]]
        sent = "0" if peers == 1 else f"{row['mb_per_peer']:,.1f}"
        if share > 1:
            sent = f"{data_parallel_mb(row['steps'], row['parameters']):,.0f} (computed)"
        lines.append(
            f"| {row['arm']} | {row['steps']:,} | {row['sync_every'] if peers > 1 else '–'} | {row['batch'] * share} "
            f"| {row['tokens']:,} | {row['loss']:.3f} | {math.exp(row['loss']):,.0f} | {sent} |"
        )
    return "\n".join(lines)


def read(path: Path, size: Size) -> list[dict[str, Any]]:
    """The runs of this size in a file of results, in the order of ARMS."""
    rows = [row for row in kept_runs.read(path) if asdict(size).items() <= row.items()]
    return sorted(rows, key=lambda row: list(ARMS).index(row["arm"]))


def tokens(work: Path, megabytes: float) -> Path:
    """The prepared text, as `p2ptrain data prepare library.txt --tokenizer train:4096 --held-out 0.05` makes it."""
    out = work / "tokens"
    if not (out / META_FILE).exists():
        work.mkdir(parents=True, exist_ok=True)
        (work / "library.txt").write_text(library_text(megabytes), encoding="utf-8")
        prepare(
            (str(work / "library.txt"),), out, tokenizer=f"train:{VOCABULARY}", field="text", split="train",
            held_out=0.05, jobs=1, say=click.echo, on_progress=lambda progress: None,
        )  # fmt: skip
    return out


def measure(size: Size, data: Path, results: Path) -> list[dict[str, Any]]:
    """Run the arms that are not in the file of results, append them to it, and return all of this size."""
    done = {row["arm"] for row in read(results, size)}
    for arm in (arm for arm in ARMS if arm not in done):
        click.echo(f"{arm} … ", nl=False)
        row = {**run(arm, size, data), "machine": machine()}
        kept_runs.append(results, row)
        click.echo(f"loss {row['loss']}, {row['seconds']} s of a core")
    return read(results, size)


@click.command("python -m benchmarks.larger")
@click.option("--steps", default=Size.steps, show_default=True, help="Of each peer.")
@click.option("--sync-every", default=Size.sync_every, show_default=True, help="Steps between two rounds.")
@click.option("--batch", default=Size.batch, show_default=True, help="Windows of 128 tokens in a step of a peer.")
@click.option("--work", default="p2ptrain-larger", type=click.Path(path_type=Path), help="Directory for the tokens.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="File of one JSON line for each run.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing: print and write the table.")
def main(steps: int, sync_every: int, batch: int, work: Path, results: Path, only_report: bool) -> None:
    """Train what is missing, print the table of all that is done, and write it to docs/evidence/results.md."""
    size = Size(steps=steps, sync_every=sync_every, batch=batch)
    if not only_report:
        measure(size, tokens(work, size.megabytes), results)
    made = table(kept_runs.read(results))
    click.echo(made)
    if results == RESULTS:
        kept_runs.write_between(PAGE, BEGIN, END, [made])


if __name__ == "__main__":
    main()
