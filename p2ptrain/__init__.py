"""p2ptrain: train one neural network together over the open internet, peer to peer, with no server in charge.

    with p2ptrain.join(model, run_id="my-run", initial_peers=[...]) as peer:
        for batch in batches(seed=peer.data_seed):
            ...                      # any training step
            peer.step(loss=loss.item(), samples=len(batch))

Names are imported on first use: importing torch and the network takes seconds, which `p2ptrain --help` should not.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.api import DiLoCo, Sparta, join
    from p2ptrain.errors import ConfigError, RunMismatchError
    from p2ptrain.peer.peer import Peer
    from p2ptrain.protocol.exchange.types import RoundReport, StepReport
    from p2ptrain.simulation.experiment import Experiment
    from p2ptrain.simulation.swarm import simulate

__version__ = "0.1.0"  # setup.cfg reads it from here

_HOMES = {
    "ConfigError": "p2ptrain.errors",
    "DiLoCo": "p2ptrain.api",
    "Experiment": "p2ptrain.simulation.experiment",
    "Peer": "p2ptrain.peer.peer",
    "RoundReport": "p2ptrain.protocol.exchange.types",
    "RunMismatchError": "p2ptrain.errors",
    "Sparta": "p2ptrain.api",
    "StepReport": "p2ptrain.protocol.exchange.types",
    "join": "p2ptrain.api",
    "simulate": "p2ptrain.simulation.swarm",
}

__all__ = [
    "ConfigError",
    "DiLoCo",
    "Experiment",
    "Peer",
    "RoundReport",
    "RunMismatchError",
    "Sparta",
    "StepReport",
    "__version__",
    "join",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
