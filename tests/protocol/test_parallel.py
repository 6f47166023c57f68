"""Work in pieces has the results of one thread, and leaves nothing behind: pieces that have begun have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio
import trio.testing

from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.wire.transport import Inline

THREADS = (1, 4)


def with_workers(threads: int, test: Callable[[Workers], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        workers = Workers(threads)
        try:
            await test(workers)
        finally:
            workers.close()

    trio.run(main)


@pytest.mark.parametrize("threads", THREADS)
def test_results_come_in_the_order_of_the_pieces(threads: int) -> None:
    async def main(workers: Workers) -> None:
        for pieces in (range(0), range(1), range(3), range(200)):
            assert await in_parallel(workers, lambda n: n * n, pieces) == [n * n for n in pieces]

    with_workers(threads, main)


def test_as_many_pieces_as_threads_run_at_the_same_time() -> None:
    async def main(workers: Workers) -> None:
        together = threading.Barrier(4)
        await in_parallel(workers, lambda _: together.wait(), range(8))

    with_workers(4, main)


def test_one_thread_takes_all_pieces_in_one_visit() -> None:
    visits = 0

    class Counting(Inline):
        async def __call__(self, work: Callable[..., Any], /, *args: Any) -> Any:
            nonlocal visits
            visits += 1
            return work(*args)

    async def main() -> None:
        assert await in_parallel(Counting(), str, range(20)) == [str(n) for n in range(20)]

    trio.run(main)
    assert visits == 1


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_piece_that_fails_gives_the_error_and_later_ones_are_left_out(threads: int) -> None:
    async def main(workers: Workers) -> None:
        failing, begun = threading.Barrier(min(2, threads)), list[int]()

        def work(number: int) -> None:
            begun.append(number)
            if number in (3, 4):
                failing.wait()  # with several threads both fail
                raise ValueError(f"piece {number}")

        with pytest.raises(ValueError, match="piece 3"):
            await in_parallel(workers, work, range(1000))
        assert sorted(begun)[:4] == [0, 1, 2, 3]
        assert len(begun) < 1000
        assert await in_parallel(workers, str, [1]) == ["1"]

    with_workers(threads, main)


@pytest.mark.parametrize("threads", THREADS)
def test_pieces_that_have_begun_have_ended_when_it_is_cancelled(threads: int) -> None:
    async def main(workers: Workers) -> None:
        began, go_on, ended = threading.Semaphore(0), threading.Event(), list[int]()

        def work(number: int) -> None:
            began.release()
            go_on.wait()
            ended.append(number)

        async def let_go() -> None:
            for _ in range(threads):
                await trio.to_thread.run_sync(began.acquire)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                assert ended == []
                go_on.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_go)
            await in_parallel(workers, work, range(threads))
            await trio.lowlevel.checkpoint()
            raise AssertionError("not cancelled")
        assert sorted(ended) == list(range(threads))

    with_workers(threads, main)


def test_what_waits_for_a_thread_is_left_out_when_it_is_cancelled() -> None:
    async def main(workers: Workers) -> None:
        began, go_on, begun = threading.Event(), threading.Event(), list[int]()

        def occupy() -> None:
            began.set()
            go_on.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers, occupy)
            await trio.to_thread.run_sync(began.wait)
            with trio.move_on_after(0):
                await in_parallel(workers, begun.append, range(5))
            go_on.set()
        assert begun == []

    with_workers(1, main)
