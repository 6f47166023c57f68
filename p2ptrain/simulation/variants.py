"""Runs several experiments in parallel, one process per core, and shows their progress.

Ctrl-C ends them at once. An executor alone would wait for the running experiments, which can take hours.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from p2ptrain.signals import SIGNALS, interrupts_call
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.swarm import simulate
from p2ptrain.training.data.prepare import end_with_parent

POLL_S = 0.1

_progress: Any = None


def simulate_variants(
    experiments: Sequence[Experiment], on_progress: Callable[[int, int], None] = lambda number, step: None
) -> list[Records]:
    """Simulate every experiment, one per core at a time. The records are the same as those of `simulate`.

    Args:
        experiments: in the order of the result.
        on_progress: called with the number of an experiment and its step.

    Raises:
        ConfigError: a setting is invalid, or a run does not end.
        KeyboardInterrupt: Ctrl-C was pressed; all processes have ended.
    """
    workers = min(len(experiments), os.cpu_count() or 1)
    if workers == 1:
        return [simulate(experiment, partial(on_progress, i)) for i, experiment in enumerate(experiments)]
    # fork would not copy torch's threads.
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    earlier = set(multiprocessing.active_children())
    interrupted = threading.Event()
    # An exception inside the executor's code could leave a process behind.
    with interrupts_call(interrupted.set):
        pool = ProcessPoolExecutor(workers, context, _prepare, (channel,))
        try:
            # Signals may be sent to all processes: those that start now ignore them, and this one ends them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                futures = [pool.submit(_simulate_one, i, experiment) for i, experiment in enumerate(experiments)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _tell_progress(futures, channel, on_progress, interrupted)
            records = [future.result() for future in futures]
            pool.shutdown()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - earlier:
                process.kill()
            raise
    if interrupted.is_set():  # after the last was done
        raise KeyboardInterrupt
    return records


@contextlib.contextmanager
def progress_bars(experiments: Sequence[Experiment]) -> Iterator[Callable[[int, int], None]]:
    """A bar for each experiment on stderr; a line for each tenth of it if stderr is not a terminal."""
    console = Console(file=sys.stderr)
    totals = [experiment.run.total_steps for experiment in experiments]
    if not console.is_terminal:
        printed = [0] * len(experiments)

        def show(number: int, step: int) -> None:
            tenth = 10 * step // totals[number]
            if tenth > printed[number]:
                printed[number] = tenth
                console.print(f"{experiments[number].name}: step {step} of {totals[number]}", highlight=False)

        yield show
        return
    bar = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*bar, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        tasks = [progress.add_task(e.name, total=total) for e, total in zip(experiments, totals, strict=True)]
        yield lambda number, step: progress.update(tasks[number], completed=step)
        for task, total in zip(tasks, totals, strict=True):
            progress.update(task, completed=total)


def _tell_progress(
    futures: Sequence[Future[Records]], channel: Any, on_progress: Callable[[int, int], None], stop: threading.Event
) -> None:
    """Wait until all are done, and pass on their progress. Raises the first failure, or KeyboardInterrupt on `stop`."""
    while not all(future.done() for future in futures):
        if stop.is_set():
            raise KeyboardInterrupt
        for future in futures:
            if future.done():
                future.result()
        with contextlib.suppress(queue.Empty):
            on_progress(*channel.get(timeout=POLL_S))


def _prepare(channel: Any) -> None:
    global _progress
    _progress = channel
    end_with_parent()


def _simulate_one(number: int, experiment: Experiment) -> Records:
    return simulate(experiment, lambda step: _progress.put((number, step)))
