"""Work in the worker threads yields to training. Training, and trio's own threads, keep their priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing

from p2ptrain.peer.worker import MOST_THREADS, NICER, Workers, default_threads


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def with_worker(test: Callable[[Workers], Coroutine[Any, Any, None]], threads: int = 1) -> None:
    async def main() -> None:
        worker = Workers(threads)
        try:
            await test(worker)
        finally:
            worker.close()

    trio.run(main)


@pytest.mark.parametrize("threads", [1, 3])
def test_only_the_worker_threads_yield(threads: int) -> None:
    async def main(worker: Workers) -> None:
        before, seen = own_nice(), list[int]()

        async def note() -> None:
            seen.append(await worker(own_nice))

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(note)
        nicer = min(19, before + NICER) if sys.platform == "linux" else before
        assert seen == [nicer] * 4
        # trio polls for the network with these threads.
        assert await trio.to_thread.run_sync(own_nice) == before
        assert own_nice() == before

    with_worker(main, threads)


def test_arguments_result_and_exception_are_passed_on() -> None:
    async def main(worker: Workers) -> None:
        assert await worker(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await worker(divmod, 7, 0)
        assert await worker(divmod, 7, 2) == (3, 1)

    with_worker(main)


def test_work_is_done_in_order_one_at_a_time_by_one_thread() -> None:
    async def main(worker: Workers) -> None:
        began, go_on, seen = threading.Event(), threading.Event(), list[object]()

        def first() -> None:
            began.set()
            go_on.wait()
            seen.extend([1, threading.current_thread()])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker, first)
            await trio.to_thread.run_sync(began.wait)
            for number in (2, 3):
                nursery.start_soon(worker, lambda n: seen.extend([n, threading.current_thread()]), number)
                await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            go_on.set()
        assert seen[::2] == [1, 2, 3]
        assert len(set(seen[1::2])) == 1

    with_worker(main)


def test_cancelled_work_is_ended_if_it_has_begun_and_left_out_if_not() -> None:
    async def main(worker: Workers) -> None:
        began, go_on, results = threading.Event(), threading.Event(), list[str]()

        def work() -> str:
            began.set()
            go_on.wait()
            return "done"

        async def keep_result() -> None:
            results.append(await worker(work))
            await trio.lowlevel.checkpoint()
            results.append("not cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_result)
            await trio.to_thread.run_sync(began.wait)
            nursery.start_soon(worker, results.append, "begun after the cancellation")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            assert results == []
            go_on.set()
        assert results == ["done"]

    with_worker(main)


def test_work_is_begun_in_order_in_all_threads() -> None:
    async def main(worker: Workers) -> None:
        began, go_on, seen = threading.Barrier(4), threading.Event(), list[object]()

        def first() -> None:
            began.wait()
            go_on.wait()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(worker, first)
            await trio.to_thread.run_sync(began.wait)  # three are at work at the same time
            for number in range(9):
                nursery.start_soon(worker, lambda n: seen.append(n), number)
                await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            go_on.set()
        assert sorted(seen) == list(range(9))

    with_worker(main, 3)


def test_closed_workers_end_their_threads_after_what_has_begun_and_work_is_still_done() -> None:
    async def main() -> None:
        worker, began, go_on = Workers(2), threading.Barrier(3), threading.Event()

        def work() -> threading.Thread:
            began.wait()
            go_on.wait()
            return threading.current_thread()

        threads, waited = list[threading.Thread](), list[threading.Thread]()

        async def note(into: list[threading.Thread], of: Callable[[], threading.Thread]) -> None:
            into.append(await worker(of))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(note, threads, work)
            await trio.to_thread.run_sync(began.wait)
            nursery.start_soon(note, waited, threading.current_thread)  # no thread is free for it
            await trio.testing.wait_all_tasks_blocked()
            worker.close()
            go_on.set()
        assert len(set(threads)) == 2
        for thread in threads:
            await trio.to_thread.run_sync(thread.join)
        assert not set(waited) & set(threads)
        assert await worker(threading.current_thread) not in threads

    trio.run(main)


def test_the_default_is_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {1: 1, 2: 1, 3: 1, 4: 2, 12: 6, 16: 8, 64: MOST_THREADS}
    for cores, threads in expected.items():
        monkeypatch.setattr("p2ptrain.peer.worker.usable_cores", lambda cores=cores: cores)
        assert default_threads() == threads


def test_subnormals_count_even_if_the_thread_that_joins_flushes_them() -> None:
    """All peers compute the same bits, and a library that was imported may have changed the mode."""

    tiny = np.full(4, 1e-39, np.float32)

    async def main(worker: Workers) -> None:
        assert await worker(lambda: bool((tiny * np.float32(0.5) > 0).all()))

    torch.set_flush_denormal(True)
    try:
        with_worker(main)
    finally:
        torch.set_flush_denormal(False)
