"""Plots a simulation: loss, correlation of the weights and bytes sent of all variants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from p2ptrain.monitor.plot_style import COLOURS, plot
from p2ptrain.simulation.records import Records

STYLES = ("-", "--", ":", "-.")


def save_plot(title: str, variants: Sequence[Records], path: Path) -> None:
    """Write the plot as PNG."""
    tables = [records.table() for records in variants]
    with plot(path, (2.2, 1, 1)) as (losses, correlation, sent):
        for number, (records, table) in enumerate(zip(variants, tables, strict=True)):
            colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
            look: dict[str, Any] = {"color": colour, "linestyle": style}
            _curve(losses, table, "held_out_loss", label=records.experiment.name, **look)
            if table:
                losses.plot(table[-1]["step"], records.final_loss, "o", color=look["color"])
            _curve(correlation, table, "correlation", **look)
            sent.plot([r["step"] for r in table], [r["bytes_sent"] / 1e6 for r in table], linewidth=1.4, **look)
            for round_ in records.rounds:
                step = (round_["t"] - records.began_s) / records.experiment.step_s
                correlation.axvline(step, linewidth=0.3, alpha=0.4, **look)
        # Cut off the steep start, which is the same for all variants.
        seconds = [table[1]["held_out_loss"] for table in tables if len(table) > 2]
        if seconds and None not in seconds:
            merged = [records.final_loss for records in variants if math.isfinite(records.final_loss)]
            losses.set_ylim(top=max([*filter(None, seconds), *merged]) * 1.01)
        losses.set_title(title)
        losses.set_ylabel("loss on held-out text, nats\n(dots: merged, after the last round)")
        losses.legend(frameon=False)
        correlation.set_ylabel("correlation\n(thin: rounds)")
        sent.set_ylabel("MB sent, all peers")
        sent.set_xlabel("step of the run")


def _curve(axes: Axes, table: list[dict[str, Any]], column: str, **look: Any) -> None:
    points = [(row["step"], row[column]) for row in table if row[column] is not None]
    axes.plot(*zip(*points, strict=True) if points else ([], []), linewidth=1.4, **look)
