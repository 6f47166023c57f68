"""Averaging strategies: how the members' outer gradients become one mean.

`strategy` has the interface, and every other file one strategy. A new one is a file here, a line in `STRATEGIES`, and
its name in `config.AVERAGINGS`. Weights and contributors are decided in `rounds/policy.py`. With pairwise steps
(`protocol/pairwise`), the one round of a run is averaged as with "parts".
"""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.protocol.rounds.averaging.gather import Gather
from p2ptrain.protocol.rounds.averaging.parts import Parts
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.settings.config import RunConfig

STRATEGIES: dict[str, Callable[[RunConfig], Averaging]] = {"parts": Parts, "gather": Gather}


def averaging_of(run: RunConfig) -> Averaging:
    """The strategy in a run's settings; with pairwise steps, that of the run's one round."""
    return (Parts if run.is_pairwise else STRATEGIES[run.averaging])(run)
