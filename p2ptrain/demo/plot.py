"""The plot of a demo: losses above, correlation of the weights below, with marks for the kill and the join."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from p2ptrain.formatting import clock
from p2ptrain.monitor.plot_style import COLOURS, plot
from p2ptrain.monitor.swarmview import SwarmView

# Points of a curve of training losses.
GROUPS = 150


def save_plot(swarm: SwarmView, path: Path) -> None:
    """Write the plot as PNG."""
    with plot(path, (2.2, 1)) as (losses, correlation):
        _plot_losses(losses, swarm)
        _plot_correlation(correlation, swarm)
        for axes in (losses, correlation):
            _mark_events(axes, swarm)


def smooth(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of at most `GROUPS` consecutive groups of (time, loss), of at least ten points each."""
    values = np.asarray(list(points), np.float64).reshape(-1, 2)
    parts = np.array_split(values, max(1, min(GROUPS, len(values) // 10)))
    return [(t, loss) for t, loss in (part.mean(axis=0) for part in parts if len(part))]


def _plot_losses(axes: Axes, swarm: SwarmView) -> None:
    for peer in swarm.peers.values():
        colour = COLOURS[(peer.number - 1) % len(COLOURS)]
        axes.plot(*_curve(swarm, smooth(peer.losses)), color=colour, linewidth=0.7, alpha=0.4)
        axes.plot(*_curve(swarm, peer.held_out), color=colour, linewidth=1.6, label=peer.name)
    axes.set_ylabel("loss, nats a character\n(thick: held-out text, thin: training)")
    axes.legend(frameon=False, ncols=2)


def _plot_correlation(axes: Axes, swarm: SwarmView) -> None:
    points = [(found.t, found.value) for found in swarm.correlations()]
    axes.plot(*_curve(swarm, points), color="black", linewidth=1.2)
    for round_ in swarm.rounds.applied:
        axes.axvline(round_.t - swarm.began_s, color="grey", linewidth=0.5, alpha=0.5)
    axes.set_ylabel("correlation of the weights\n(grey: rounds)")
    axes.set_xlabel("time since the start")
    axes.xaxis.set_major_formatter(lambda seconds, _: clock(seconds))


def _curve(swarm: SwarmView, points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The coordinates of a curve: seconds since the start, and values."""
    points = list(points)
    return [t - swarm.began_s for t, _ in points], [value for _, value in points]


def _mark_events(axes: Axes, swarm: SwarmView) -> None:
    for label, event, colour in (("killed", swarm.killed_at, "#B00020"), ("joins", swarm.joined_at, "#1B7F3B")):
        if event is not None:
            number, at_s = event[0], event[1] - swarm.began_s
            axes.axvline(at_s, color=colour, linewidth=1.2, linestyle="--")
            where = ("data", "axes fraction")
            text = f"peer {number} {label}"
            axes.annotate(text, (at_s, 1.0), (4, -2), where, "offset points", color=colour, va="top")
