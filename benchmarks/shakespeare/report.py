"""The file of results, and the tables and pictures of docs/evidence/results.md that are made from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import kept_runs
from benchmarks.shakespeare.cells import ALONE, GRID, LARGE, PARALLEL, PEERS, SIMULATED, TOGETHER, Cell, stages
from benchmarks.shakespeare.plot import draw_bytes, draw_curves, draw_simulated, has_curve, methods

EVIDENCE = Path(__file__).parent.parent.parent / "docs/evidence"
RESULTS, PAGE = EVIDENCE / "results" / "shakespeare.jsonl", EVIDENCE / "results.md"
BEGIN, END = "<!-- made by make results -->", "<!-- end of what make results makes -->"
PARAMETERS = 809_856
NAMES = {
    ALONE: "one peer", LARGE: "data parallel, in one process", PARALLEL: "data parallel, gloo",
    TOGETHER: "four peers", SIMULATED: "four peers, simulated",
}  # fmt: skip
STAGES = {
    1: "one peer, 2000 and 500 steps",
    2: "data parallel in one process, 500 steps",
    3: "four peers, 500 steps: AdamW with int8, Muon with int4, p = 0.5 %",
    4: "the same, 2000 steps each",
    5: "four peers, 500 steps: the other codecs and p",
    6: "data parallel over gloo, 500 steps",
    7: "data parallel in one process, 2000 steps",
    8: "four peers, 2000 steps: the other codecs and p",
    9: "simulated: four peers, 500 steps, all codecs and p",
    10: "simulated: four peers, 2000 steps, those of stage 4",
    11: "simulated: four peers, 2000 steps, AdamW: rounds alone, gossip alone",
}

Results = dict[Cell, dict[str, Any]]
Row = Sequence[tuple[Cell, dict[str, Any]]]


def read(path: Path) -> Results:
    """The runs in a file of results, each once: the last counts."""
    names = [field.name for field in dataclasses.fields(Cell)]
    return {Cell(*(row[name] for name in names)): row for row in kept_runs.read(path)}


def grouped(results: Results) -> list[Row]:
    """The runs that differ in nothing but the seed, in the order of the stages."""
    order = {dataclasses.replace(cell, seed=0): None for _, cells in stages() for cell in cells}
    groups: dict[Cell, list[tuple[Cell, dict[str, Any]]]] = {cell: [] for cell in order}
    for cell, row in sorted(results.items()):
        groups[dataclasses.replace(cell, seed=0)].append((cell, row))
    return [runs for runs in groups.values() if runs]


def data_parallel_mb(steps: int, parameters: int = PARAMETERS) -> float:
    """What each of four processes sends in that many ring all-reduces of float32 gradients."""
    return 8 * parameters * (PEERS - 1) / PEERS * steps / 1e6


def table(results: Results) -> str:
    """Markdown: a row for each kind of run, with the mean over its seeds and their range."""
    lines = [
        "| | inner | steps | rounds, p | seeds | loss | tokens | MB a peer | rounds late, steps | seconds (load) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for runs in grouped(results):
        cell, rows = runs[0][0], [row for _, row in runs]
        settings = f"{cell.codec}, {100 * cell.p:g} %" if cell.is_swarm else "–"
        tokens = statistics.fmean(row["tokens"] for row in rows) / 1e6
        lines.append(
            f"| {NAMES[cell.arm]} | {cell.optimizer} | {cell.steps} | {settings} | {len(rows)} | {_loss(rows)} | "
            f"{tokens:.2f}M | {_sent(cell, rows)} | {_late(rows)} | {_seconds(rows)} |"
        )
    return "\n".join(lines)


def compared(results: Results) -> str:
    """Markdown: the runs of real peers beside those of simulated ones with the same settings."""
    lines = [
        "| inner | steps | rounds, p | loss, real | loss, simulated | difference | MB, real | MB, simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for runs in grouped(results):
        cell, rows = runs[0][0], [row for _, row in runs]
        twins = _of_kind(results, dataclasses.replace(cell, arm=SIMULATED))
        if cell.arm == TOGETHER and twins:
            difference = _mean(twins, "loss") - _mean(rows, "loss")
            lines.append(
                f"| {cell.optimizer} | {cell.steps} | {cell.codec}, {100 * cell.p:g} % | {_loss(rows)} | "
                f"{_loss(twins)} | {difference:+.3f} | {_mean(rows, 'mb_per_peer'):,.1f} | "
                f"{_mean(twins, 'mb_per_peer'):,.1f} |"
            )
    return "\n".join(lines)


def grid(results: Results) -> str:
    """Markdown: loss and megabytes a peer of the simulated runs of 500 steps, by codec and p."""
    shares = sorted({p for _, _, p in GRID})
    lines = [
        "| simulated, 500 steps | " + " | ".join(f"p = {100 * p:g} %" for p in shares) + " |",
        "|---" * (1 + len(shares)) + "|",
    ]
    for optimizer, codec in dict.fromkeys((optimizer, codec) for optimizer, codec, _ in GRID):
        fields = []
        for p in shares:
            rows = _of_kind(results, Cell(SIMULATED, optimizer, 500, 0, codec, p))
            fields.append(f"{_loss(rows)}, {_mean(rows, 'mb_per_peer'):,.1f} MB" if rows else "–")
        lines.append(f"| {optimizer}, {codec} | " + " | ".join(fields) + " |")
    return "\n".join(lines)


def done(results: Results) -> str:
    """Markdown: how many runs of each stage are done."""
    lines = ["| stage | runs | done |", "|---|---|---|"]
    for number, cells in stages():
        lines.append(f"| {number} | {STAGES[number]} | {sum(cell in results for cell in cells)} of {len(cells)} |")
    return "\n".join(lines)


def tables(results: Results) -> list[str]:
    """The tables of the page: the stages, real runs, simulated beside real ones, and the grid of simulated ones."""
    real = {cell: row for cell, row in results.items() if cell.arm != SIMULATED}
    return [done(results), table(real), compared(results), grid(results)]


def report(results: Results, page: Path = PAGE, pictures: Path = RESULTS.parent) -> None:
    """Draw the pictures, and write the tables between their marks in the page."""
    pictures.mkdir(parents=True, exist_ok=True)
    of_stages, of_real, beside, of_grid = tables(results)
    parts = [of_stages, of_real]
    for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon")):
        runs = [group for group in grouped(results) if group[0][0].optimizer == optimizer and has_curve(group[0][0])]
        if runs:
            draw_curves(runs, pictures / f"{optimizer}.png", f"{name} inside", data_parallel_mb)
            parts.append(f"![Loss with {name} against steps, tokens, bytes and seconds](results/{optimizer}.png)")
    if by_method := methods(grouped(results)):
        draw_bytes(by_method, pictures / "bytes.png", data_parallel_mb)
    if any(cell.arm == SIMULATED for cell in results):
        draw_simulated(grouped(results), pictures / "simulated.png")
        parts += ["### Simulated peers beside real ones", beside]
        parts += ["### Codecs and p, simulated", of_grid]
        parts.append("![Simulated: loss at the end against bytes, by codec and p](results/simulated.png)")
    kept_runs.write_between(page, BEGIN, END, parts)


def _loss(rows: Sequence[dict[str, Any]]) -> str:
    losses = [row["loss"] for row in rows]
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.3f}{spread}"


def _sent(cell: Cell, rows: Sequence[dict[str, Any]]) -> str:
    if cell.arm == LARGE:
        return f"{data_parallel_mb(cell.steps):,.0f} (computed)"
    return "0" if cell.arm == ALONE else f"{statistics.fmean(row['mb_per_peer'] for row in rows):,.1f}"


def _late(rows: Sequence[dict[str, Any]]) -> str:
    """Mean and largest; and how many rounds were without one of the peers."""
    rounds = [round_ for row in rows for round_ in row.get("rounds", ()) if row["arm"] in (TOGETHER, SIMULATED)]
    late = [round_["late_steps"] for round_ in rounds if round_["late_steps"] is not None]
    if not late:
        return "–"
    without = sum(round_["contributors"] < PEERS for round_ in rounds)
    missed = f"; {without} of {len(rounds)} without a peer" if without else ""
    return f"{statistics.fmean(late):.1f}, at most {max(late):.0f}{missed}"


def _of_kind(results: Results, cell: Cell) -> list[dict[str, Any]]:
    """The runs like `cell`, of all seeds."""
    return [row for other, row in results.items() if dataclasses.replace(other, seed=cell.seed) == cell]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _seconds(rows: Sequence[dict[str, Any]]) -> str:
    if rows[0]["arm"] == SIMULATED:
        return "–"
    load = statistics.fmean(statistics.fmean(row["load"]) for row in rows)
    return f"{statistics.fmean(row['seconds'] for row in rows):,.0f} ({load:.0f})"
