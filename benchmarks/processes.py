"""Worker processes: started together, controlled over pipes, and always ended with all their descendants."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil
import torch


class WorkerError(RuntimeError):
    """A worker process raised, ended early or did not answer in time."""


class Workers:
    """Processes that run `work(pipe, *arguments)` and exchange messages over their pipe; a context manager.

    Workers are spawned, not forked, with one torch thread each. On exit, those that still run get 20 s (2 s after an
    exception) to end; then they and all their descendants are killed.

    Args:
        work: importable function; it may `pipe.send` results and `pipe.recv` messages. Its return value is ignored.
        arguments: one tuple per worker.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._work = work
        self._arguments = arguments
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Workers:
        context = multiprocessing.get_context("spawn")
        for arguments in self._arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_main, args=(self._work, theirs, arguments))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        trees = [descendants(pid) for pid in self.pids]
        for pipe in self._pipes:
            pipe.close()
        patience_until = time.monotonic() + (20.0 if error is None else 2.0)
        for process in self._processes:
            process.join(max(0.0, patience_until - time.monotonic()))
        for leftover in (process for tree in trees for process in tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()
        for process in self._processes:
            process.join()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes if process.pid is not None]

    def tell(self, message: Any) -> None:
        """Send one message to every worker."""
        for pipe in self._pipes:
            pipe.send(message)

    def tell_one(self, index: int, message: Any) -> None:
        """Send one message to one worker."""
        self._pipes[index].send(message)

    def hear(self, timeout_s: float) -> list[Any]:
        """Wait for the next message of every worker. Raises WorkerError if one fails or sends nothing in time."""
        deadline = time.monotonic() + timeout_s
        return [self._hear_one(index, deadline) for index in range(len(self._pipes))]

    def hear_from(self, index: int, timeout_s: float) -> Any:
        """Wait for the next message of one worker. Raises WorkerError if it fails or sends nothing in time."""
        return self._hear_one(index, time.monotonic() + timeout_s)

    def _hear_one(self, index: int, deadline: float) -> Any:
        if not self._pipes[index].poll(max(0.0, deadline - time.monotonic())):
            raise WorkerError(f"worker {index} sent no message in time")
        try:
            message = self._pipes[index].recv()
        except EOFError:
            raise WorkerError(f"worker {index} ended without a message") from None
        if isinstance(message, _Failure):
            raise WorkerError(f"worker {index} failed:\n{message.traceback}")
        return message


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[psutil.Process]:
    """The process and its descendants that still run."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class _Failure:
    def __init__(self, text: str) -> None:
        self.traceback = text


def _worker_main(work: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        work(pipe, *arguments)
    except Exception:
        with contextlib.suppress(OSError):  # the benchmark no longer waits for this worker
            pipe.send(_Failure(traceback.format_exc()))
    finally:
        pipe.close()
