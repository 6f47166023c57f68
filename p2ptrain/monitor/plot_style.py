"""How all our pictures look: those of the demo, of simulations and of reproductions."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colours: told apart by everyone.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
# For matplotlib's `rc_context`.
LOOK: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
