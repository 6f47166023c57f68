"""Shared frame and style of the plots of the demo, simulations and reproductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")

STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


@contextmanager
def plot(path: Path, heights: Sequence[float]) -> Iterator[Sequence[Axes]]:
    """Write panels of these relative heights, one below the other, as PNG at the end of the block."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 2 * sum(heights)), layout="constrained")
        yield figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        figure.savefig(path, dpi=130)
