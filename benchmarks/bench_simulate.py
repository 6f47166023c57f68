"""CPU time of a simulated swarm beyond the training steps of its peers, with the demo model."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.row import Row
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.swarm import simulate
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import build_of
from p2ptrain.training.trainer import Trainer, TrainingData

# Interleaved, because the speed of the machine varies.
REPEATS = 5
STEPS = 300
TARGET = 0.25
MANY_PEERS, MANY_STEPS = 64, 60


def run() -> list[Row]:
    torch.set_num_threads(1)
    # p of the demo; evaluated at the beginning and at the end, which the bare loop does not do.
    experiment = Experiment.of(peers=8, steps=STEPS, sync_every=100, fragment_fraction=0.02, eval_every=STEPS)
    simulate(Experiment.of(peers=2, steps=5, eval_every=5))  # warm up imports and caches
    pairs = [(_bare_s(experiment), _simulated_s(experiment)) for _ in range(REPEATS)]
    extra = statistics.median(simulated / bare - 1 for bare, simulated in pairs)
    bare_s, simulated_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    many_s = _simulated_s(Experiment.of(peers=MANY_PEERS, steps=MANY_STEPS, sync_every=30, eval_every=MANY_STEPS))
    return [
        Row(
            f"simulate: 8 peers of the demo model, {STEPS} steps, three rounds, joining and evaluations included",
            f"≤ {100 * TARGET:.0f} % on top of the bare steps",
            f"{100 * extra:+.1f} % (median of {REPEATS} pairs; {simulated_s:.1f} s of CPU)",
            extra <= TARGET,
            f"bare steps, one peer after the other: {bare_s:.1f} s",
            {"extra": extra, "bare_s": bare_s, "simulated_s": simulated_s},
        ),
        Row(
            f"simulate: {MANY_PEERS} peers of the demo model, {MANY_STEPS} steps, two rounds",
            "runs to its end",
            f"{many_s:.0f} s of CPU",
            True,
            values={"simulated_s": many_s},
        ),
    ]


def _simulated_s(experiment: Experiment) -> float:
    begun_s = time.process_time()
    simulate(experiment)
    return time.process_time() - begun_s


def _bare_s(experiment: Experiment) -> float:
    """CPU seconds of the training steps alone: forward, backward, clipping and optimizer of every peer."""
    run, corpus = experiment.run, load_corpus(experiment.data, Characters())
    trainers = [
        Trainer(build_of(run), TrainingData(corpus), run, batch_size=experiment.batch_size, seed=number)
        for number in range(experiment.peers)
    ]
    begun_s = time.process_time()
    for step in range(run.total_steps):
        for trainer in trainers:
            trainer.step(step)
    return time.process_time() - begun_s
