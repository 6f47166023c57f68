"""Peers that compute and send in different ways, in one swarm, agree on every bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.algorithms import kernels
from tests.protocol.swarm import RUN, Swarm, Worker, run_virtual, swarm

NAMES = "abcd"


class NumpyWorker(Worker):
    """Works as if the library in C was not there."""

    async def __call__(self, work: Callable[..., Any], /, *args: Any) -> Any:
        def without_library() -> Any:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(kernels, "library", lambda: None)
                return work(*args)

        return await super().__call__(without_library)


def direct(s: Swarm) -> dict[str, int]:
    """How many bulk connections each peer has."""
    return {name: sum(stream.is_bulk for stream in s.network.transports[name].streams) for name in NAMES}


@pytest.mark.parametrize("codec", ["int8", "int4", "fp16"])
def test_peers_of_all_kinds_agree_on_every_bit(codec: str) -> None:
    """With the loops in C and with numpy, with 1 and 4 worker threads, on direct connections and through libp2p."""

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, round_codec=codec, audit_rate=1.0)) as s:
            s.network.can_dial_bulk = lambda source, target: "c" not in (source, target)
            s.network.relays[frozenset("ac")] = "d"
            workers = {"a": Worker(threads=1), "b": NumpyWorker(threads=4), "c": Worker(threads=4), "d": NumpyWorker()}
            for name in NAMES:
                s.worker = workers[name]
                s.start(name, founder=name == "a")
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 5 for name in NAMES))
            rounds = [s.peers[name].rounds("committed") for name in NAMES]
            last = [{event["round"]: (event["anchor_hash"], event["group_size"]) for event in of} for of in rounds]
            shared = set.intersection(*map(set, last))
            assert len(shared) >= 4
            assert all(len({of[number] for of in last}) == 1 for number in shared)
            assert any(last[0][number][1] == len(NAMES) for number in shared)
            assert direct(s)["c"] == 0
            assert min(direct(s)[name] for name in "abd") >= 1

    run_virtual(main)
