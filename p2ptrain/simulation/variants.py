"""Several experiments side by side, one process for each core, with the progress of all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.swarm import simulate

POLL_S = 0.1

_progress: Any = None


def simulate_variants(
    experiments: Sequence[Experiment], on_progress: Callable[[int, int], None] = lambda arm, step: None
) -> list[Records]:
    """Simulate every experiment, as many at once as there are cores; the records are those of `simulate`.

    Args:
        experiments: in the order of the result.
        on_progress: called with the number of an experiment and its step.

    Raises:
        ConfigError: a setting cannot work, or a run does not come to its end.
    """
    workers = min(len(experiments), os.cpu_count() or 1)
    if workers == 1:
        return [simulate(experiment, partial(on_progress, i)) for i, experiment in enumerate(experiments)]
    # Forking would copy torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    with ProcessPoolExecutor(workers, context, _prepare, (channel,)) as pool:
        futures = [pool.submit(_simulate_one, i, experiment) for i, experiment in enumerate(experiments)]
        try:
            _tell_progress(futures, channel, on_progress)
            return [future.result() for future in futures]
        except BaseException:
            processes = list(pool._processes.values())  # shutting down forgets them
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise


def _tell_progress(futures: Sequence[Future[Records]], channel: Any, on_progress: Callable[[int, int], None]) -> None:
    while not all(future.done() for future in futures):
        if any(future.done() and future.exception() for future in futures):
            return
        with contextlib.suppress(queue.Empty):
            on_progress(*channel.get(timeout=POLL_S))


def _prepare(channel: Any) -> None:
    global _progress
    _progress = channel


def _simulate_one(number: int, experiment: Experiment) -> Records:
    return simulate(experiment, lambda step: _progress.put((number, step)))
