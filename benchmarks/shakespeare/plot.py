"""The pictures of docs/evidence/results.md: curves against steps, tokens, bytes and seconds; losses by bytes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.shakespeare.cells import (
    ALONE,
    CONTEXT,
    FIRST,
    GOSSIP_ALONE,
    LARGE,
    PARALLEL,
    PEERS,
    ROUNDS_ALONE,
    SIMULATED,
    TOGETHER,
    Cell,
)
from p2ptrain.monitor.plot_style import COLOURS, STYLE

Runs = Sequence[tuple[Cell, dict[str, Any]]]
Megabytes = Callable[[int], float]

# Of nanoGPT's README, on windows of its own.
PUBLISHED = 1.88
LOOKS = {
    (ALONE, 2000): ("one peer, 2000 steps", COLOURS[6]),
    (ALONE, 500): ("one peer, 500 steps", COLOURS[7]),
    (LARGE, 500): ("data parallel, 500 steps", COLOURS[1]),
    (PARALLEL, 500): ("DistributedDataParallel, 500 steps", COLOURS[3]),
    (LARGE, 2000): ("data parallel, 2000 steps", COLOURS[5]),
    (TOGETHER, 500): ("four peers, 500 steps", COLOURS[0]),
    (TOGETHER, 2000): ("four peers, 2000 steps", COLOURS[2]),
}


def has_curve(cell: Cell) -> bool:
    """Whether it is in the pictures of curves: of the grid, only what is run first."""
    is_first = cell.arm != TOGETHER or (cell.optimizer, cell.codec, cell.p) in FIRST
    return is_first and (cell.arm, cell.steps) in LOOKS


def draw_curves(groups: Sequence[Runs], path: Path, title: str, data_parallel_mb: Megabytes) -> None:
    """Four panels with the loss on 64 held-out windows, a mean over seeds, of groups that `has_curve`."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 6.5), layout="constrained")
        panels = figure.subplots(2, 2, sharey=True)
        steps, tokens, sent, seconds = panels.flat
        ends = []
        for runs in groups:
            cell = runs[0][0]
            label, colour = LOOKS[cell.arm, cell.steps]
            rows = _mean_curve([row["curve"] for _, row in runs])
            losses = [row[1] for row in rows]
            ends.append(losses[-1])
            look: dict[str, Any] = {"color": colour, "linewidth": 1.4, "label": label}
            _line(steps, [row[0] for row in rows], losses, look)
            _line(tokens, [row[0] * cell.batch * cell.peers * CONTEXT / 1e6 for row in rows], losses, look)
            if cell.arm == LARGE:
                # In one process nothing is sent: what four processes would send.
                _line(sent, [data_parallel_mb(int(row[0])) for row in rows[1:]], losses[1:], look)
            elif cell.arm != ALONE:
                _line(sent, [row[3] for row in rows[1:]], losses[1:], look)
            if cell.arm != LARGE:
                _line(seconds, [row[2] for row in rows], losses, look)
        sent.set_xscale("log")
        for axes, name in (
            (steps, "steps"), (tokens, "million tokens, all peers"), (sent, "MB sent by a peer"),
            (seconds, "seconds (two cores, shared with other programs)"),
        ):  # fmt: skip
            axes.axhline(PUBLISHED, color="#999999", linewidth=0.8, linestyle=":")
            axes.set_xlabel(name)
        for axes in panels[:, 0]:
            axes.set_ylabel("held-out loss, nats")
        # Cut off the steep start, which is the same for all.
        steps.set_ylim(min([PUBLISHED, *ends]) - 0.05, 2.9)
        steps.set_title(title, loc="left")
        steps.legend(frameon=False)
        transform = sent.get_yaxis_transform()
        sent.text(0.01, PUBLISHED, "nanoGPT: 1.88", transform=transform, va="bottom", color="#666666")
        figure.savefig(path, dpi=130)


def methods(groups: Sequence[Runs]) -> dict[str, Runs]:
    """The runs of 2000 steps with AdamW by method: one machine, data parallel, and peers with each half and both."""
    wanted = {
        "rounds and gossip (p2ptrain)": Cell(SIMULATED, "adamw", 2000, 0, *FIRST[0][1:]),
        "data parallel": Cell(LARGE, "adamw", 2000, 0),
        "gossip alone (SPARTA)": Cell(SIMULATED, "adamw", 2000, 0, *GOSSIP_ALONE[1:]),
        "rounds alone (DiLoCo)": Cell(SIMULATED, "adamw", 2000, 0, *ROUNDS_ALONE[1:]),
        "one machine alone": Cell(ALONE, "adamw", 2000, 0),
    }
    by_cell = {dataclasses.replace(runs[0][0], seed=0): runs for runs in groups}
    return {name: by_cell[cell] for name, cell in wanted.items() if cell in by_cell}


def draw_bytes(compared: Mapping[str, Runs], path: Path, data_parallel_mb: Megabytes) -> None:
    """The loss of `methods` on 1,000 windows at the end, by what one of four machines sent."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        for colour, (name, runs) in zip(COLOURS, compared.items(), strict=False):
            cell, loss = runs[0][0], _mean_of(runs, "loss")
            if cell.arm == ALONE:
                axes.axhline(loss, color="#999999", linewidth=1, linestyle=":")
                axes.text(0.99, loss, f"{name}, as many steps: {loss:.3f}", transform=axes.get_yaxis_transform(),
                          va="bottom", ha="right", color="#666666")  # fmt: skip
                continue
            sent = data_parallel_mb(cell.steps) if cell.arm == LARGE else _mean_of(runs, "mb_per_peer")
            axes.plot(sent, loss, "o", color=colour, markersize=11)
            # Rounds alone have a neighbour, whose name is above, and gossip alone the line of one machine.
            is_below = cell.arm == SIMULATED and not (cell.codec and cell.p)
            computed = " (computed)" if cell.arm == LARGE else ""
            label = f"{name}\n{sent:,.0f} MB{computed}: {loss:.3f}"
            axes.annotate(label, (sent, loss), xytext=(0, -11 if is_below else 11),
                          va="top" if is_below else "bottom", ha="center", color=colour,
                          textcoords="offset points")  # fmt: skip
        axes.set_title("AdamW, 2000 steps each; four peers simulated, with the protocol of real ones", loc="left")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.15, y=0.35)
        axes.set_xlabel(f"MB that each of {PEERS} machines sends")
        axes.set_ylabel("held-out loss, nats (lower is better)")
        figure.savefig(path, dpi=130)


def draw_simulated(groups: Sequence[Runs], path: Path) -> None:
    """The loss at the end of four simulated peers, 500 steps, against what a peer sent; crosses are real peers."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        for axes, optimizer, name in zip(figure.subplots(1, 2), ("adamw", "muon"), ("AdamW", "Muon"), strict=True):
            for arm, codec, colour, look in (
                (SIMULATED, "int8", COLOURS[0], "o-"), (SIMULATED, "int4", COLOURS[1], "^--"),
                (TOGETHER, "int8", COLOURS[0], "x"), (TOGETHER, "int4", COLOURS[1], "x"),
            ):  # fmt: skip
                points = sorted(
                    (cell.p, _mean_of(runs, "mb_per_peer"), _mean_of(runs, "loss"))
                    for runs in groups
                    for cell in [runs[0][0]]
                    if (cell.arm, cell.optimizer, cell.steps, cell.codec) == (arm, optimizer, 500, codec)
                )
                label = f"{codec}, {'simulated' if arm == SIMULATED else 'real peers'}"
                if points:
                    _, sent, losses = zip(*points, strict=True)
                    axes.plot(sent, losses, look, color=colour, label=label, linewidth=1, markersize=6)
                    for p, x, y in points if arm == SIMULATED else ():
                        axes.annotate(f"{100 * p:g} %", (x, y), fontsize=7, color="#555555", xytext=(5, 4),
                                      textcoords="offset points")  # fmt: skip
            axes.set_title(f"Simulated, 500 steps, {name}", loc="left")
            axes.set_xlabel(f"MB sent by one of {PEERS} peers (numbers: p)")
            axes.set_ylabel("held-out loss at the end, nats")
            axes.margins(0.12)
            if axes.lines:
                # A range of the axis that does not make differences between seeds look large.
                low, high = axes.get_ylim()
                middle, half = (low + high) / 2, max(0.06, (high - low) / 2)
                axes.set_ylim(middle - half, middle + half)
                axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=130)


def _mean_of(runs: Runs, name: str) -> float:
    return statistics.fmean(row[name] for _, row in runs)


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The mean of rows of the same step, at steps that all seeds have."""
    by_step = [{row[0]: row for row in curve} for curve in curves]
    shared = [row[0] for row in curves[0] if all(row[0] in rows for rows in by_step)]
    return [
        [statistics.fmean(column) for column in zip(*(rows[step] for rows in by_step), strict=True)] for step in shared
    ]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], look: dict[str, Any]) -> None:
    axes.plot(x, y, **look)
    axes.plot(x[-1:], y[-1:], "o", color=look["color"], markersize=4)
