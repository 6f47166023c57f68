"""Work in the worker thread yields to training. Training, and trio's own threads, keep their priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio
import trio.testing

from p2ptrain.peer.worker import NICER, Worker


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def with_worker(test: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        worker = Worker()
        try:
            await test(worker)
        finally:
            worker.close()

    trio.run(main)


def test_only_the_worker_thread_yields() -> None:
    async def main(worker: Worker) -> None:
        before, seen = own_nice(), list[int]()

        async def note() -> None:
            seen.append(await worker.run(own_nice))

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(note)
        nicer = min(19, before + NICER) if sys.platform == "linux" else before
        assert seen == [nicer] * 4
        # trio polls for the network with these threads.
        assert await trio.to_thread.run_sync(own_nice) == before
        assert own_nice() == before

    with_worker(main)


def test_arguments_result_and_exception_are_passed_on() -> None:
    async def main(worker: Worker) -> None:
        assert await worker.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await worker.run(divmod, 7, 0)
        assert await worker.run(divmod, 7, 2) == (3, 1)

    with_worker(main)


def test_work_is_done_in_order_one_at_a_time_by_one_thread() -> None:
    async def main(worker: Worker) -> None:
        began, go_on, seen = threading.Event(), threading.Event(), list[object]()

        def first() -> None:
            began.set()
            go_on.wait()
            seen.extend([1, threading.current_thread()])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, first)
            await trio.to_thread.run_sync(began.wait)
            for number in (2, 3):
                nursery.start_soon(worker.run, lambda n: seen.extend([n, threading.current_thread()]), number)
                await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            go_on.set()
        assert seen[::2] == [1, 2, 3]
        assert len(set(seen[1::2])) == 1

    with_worker(main)


def test_cancelled_work_is_ended_if_it_has_begun_and_left_out_if_not() -> None:
    async def main(worker: Worker) -> None:
        began, go_on, results = threading.Event(), threading.Event(), list[str]()

        def work() -> str:
            began.set()
            go_on.wait()
            return "done"

        async def keep_result() -> None:
            results.append(await worker.run(work))
            await trio.lowlevel.checkpoint()
            results.append("not cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_result)
            await trio.to_thread.run_sync(began.wait)
            nursery.start_soon(worker.run, results.append, "begun after the cancellation")
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            assert results == []
            go_on.set()
        assert results == ["done"]

    with_worker(main)


def test_a_closed_worker_ends_its_thread_and_work_is_still_done() -> None:
    async def main() -> None:
        worker = Worker()
        thread = await worker.run(threading.current_thread)
        worker.close()
        await trio.to_thread.run_sync(thread.join)
        assert await worker.run(threading.current_thread) is not thread

    trio.run(main)
