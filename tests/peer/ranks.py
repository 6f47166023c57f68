"""A real gloo group whose ranks are threads of this process."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_all_ranks(work: Callable[[int, dist.ProcessGroup], T], timeout_s: float = 60, size: int = 3) -> list[T]:
    """Run `work` for each rank in a thread of its own, and return the results."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        group: Any = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))
        return work(rank, group)

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
