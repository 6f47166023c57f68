"""Two peers in the programs that people have: workers that load data, coroutines, notebooks.

The table "What you train with" of docs/use/api.md says it; each row is tested here or in `test_optimizers.py`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from p2ptrain.errors import ConfigError
from p2ptrain.peer.peer import Peer
from tests.peer.pair import DEADLINE_S, WITH_END, Pair, are_equal

SLOW = pytest.mark.slow


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(9, 3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - 1).square().mean().backward()
    optimizer.step()


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows of numbers, each with the process that made it. A spawned worker gets a pickled copy."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((9,), number / 64), os.getpid()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("start", "persistent"),
    [pytest.param("fork", False, marks=SLOW), ("fork", True), pytest.param("spawn", True, marks=SLOW)],
)
def test_workers_load_the_data_of_a_peer(start: str, persistent: bool) -> None:
    """They start while the peer is in the run, so that forked ones have all of it but its threads."""
    models, workers = [linear(seed) for seed in range(2)], set[int]()
    before = set(multiprocessing.active_children())
    with Pair(models[0], run=WITH_END) as pair:
        pair.join(models[1])

        def steps() -> Iterator[None]:
            loader = DataLoader(Rows(), 8, num_workers=1, multiprocessing_context=start, persistent_workers=persistent)
            optimizer = torch.optim.SGD(models[0].parameters(), lr=0.01)
            for inputs, pids in chain.from_iterable(repeat(loader)):
                trained(models[0], optimizer, inputs)
                workers.update(pids.tolist())
                yield

        plain = torch.optim.SGD(models[1].parameters(), lr=0.01)
        loaded = steps()
        pair.finish(lambda: next(loaded), lambda: trained(models[1], plain, torch.ones(8, 9)))
        assert os.getpid() not in workers
        assert len(workers) == 1 if persistent else len(workers) > 1  # 8 batches an epoch
        assert all(peer.failure is None for peer in pair.peers)
    assert are_equal(*models)  # and the peers have left, whatever workers live
    loaded.close()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("in_thread", [False, True])
def test_coroutines_call_step_in_the_loop_or_await_it_in_a_thread(in_thread: bool) -> None:
    models, ticks = [linear(seed) for seed in range(2)], 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def train(pair: Pair, number: int) -> None:
        model, peer = models[number], pair.peers[number]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while not peer.finished:
            trained(model, optimizer, torch.ones(4, 9))
            if in_thread:
                await asyncio.to_thread(peer.step, samples=4)
            else:
                peer.step(samples=4)
                await asyncio.sleep(0)

    async def main() -> None:
        with Pair(models[0], run=WITH_END) as pair:
            ticking = asyncio.create_task(tick())
            await asyncio.to_thread(pair.join, models[1]) if in_thread else pair.join(models[1])
            await asyncio.wait_for(asyncio.gather(train(pair, 0), train(pair, 1)), DEADLINE_S)
            ticking.cancel()

    asyncio.run(main())
    assert ticks > WITH_END.total_steps
    assert are_equal(*models)


def until(done: Callable[[], bool], *peers: Peer) -> None:
    """Step peers until then."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, [(peer.status, peer.round) for peer in peers]
        for peer in peers:
            peer.step(samples=1)


@SLOW
def test_a_peer_that_a_notebook_has_forgotten_stays_a_member_without_whom_rounds_go_on() -> None:
    models = [linear(seed) for seed in range(2)]
    with Pair(models[0]) as pair:
        pair.join(models[1])
        at_work, forgotten = pair.peers
        until(lambda: at_work.round >= 2, at_work)
        assert at_work.alive == [forgotten.peer_id]
        with pytest.raises(ConfigError, match=r"leave\(\) that one first"):
            Pair(models[1])  # the cell that joins, run again
        forgotten.leave()
        until(lambda: not at_work.alive, at_work)
        with Pair(models[1]) as again:
            assert again.peers[0].founded
