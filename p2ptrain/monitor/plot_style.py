"""Shared style of the plots of the demo, simulations and reproductions."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colours, which colour-blind people can tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
# Arguments of matplotlib's `rc_context`.
LOOK: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
