"""One run of simulated peers: the nodes, protocol and training loop of real ones, in one process and in virtual time.

It has the model, data, settings and first weights of the real run of the same name; the peers draw other windows. No
step waits for a busy machine, so that every round lands equally late, and each peer pushes at every step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.shakespeare.cells import BATCH, Cell
from benchmarks.shakespeare.data import ALPHABET, held_out_loss
from benchmarks.shakespeare.events import measures
from benchmarks.shakespeare.peers import MODEL
from p2ptrain.settings.config import resolve_run
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.swarm import simulate
from p2ptrain.training.data.tokenizer import IDS

# A round then lands 3 of a peer's steps after it began. Of real peers on busy cores it was 3 to 6.
STEP_S, LATENCY_S = 0.1, 0.02


def experiment(cell: Cell, data: Path) -> Experiment:
    """The simulation of a cell."""
    run = resolve_run(
        {"run_id": cell.name, "model": MODEL, "tokenizer": IDS, "vocab_size": ALPHABET, **cell.settings}, None
    )
    return Experiment(
        run=run, name=cell.name, peers=cell.peers, seed=cell.seed, data=str(data), batch_size=BATCH,
        eval_every=cell.eval_every, step_s=STEP_S, latency_s=LATENCY_S,
    )  # fmt: skip


def run(cell: Cell, data: Path, out: Path) -> dict[str, Any]:
    """Simulate a cell; `out` is not used. `seconds` are of a core: those of the curve are virtual."""
    losses: list[float] = []

    def evaluate(models: Sequence[nn.Module]) -> None:
        losses.extend(round(held_out_loss(model, data), 4) for model in models)

    began_s = time.process_time()
    records = simulate(experiment(cell, data), on_end=evaluate)
    return {
        **measures(list(records.events.values()), started_s=records.began_s, eval_every=cell.eval_every),
        "seconds": round(time.process_time() - began_s, 1),
        "loss": round(statistics.fmean(losses), 4),
        "losses": losses,
    }
