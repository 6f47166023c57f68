"""Peers of one run, each on a machine of its own, and what their records say about how it went."""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.namespaces import Machine
from tests.links import bigrams
from tests.swarm.processes import Process, Swarm

# A quarter of a million weights: a round sends 0.27 MB each way, a fragment 1.4 kB, the state of a joiner is 2 MB.
MODEL = "--model bigrams:bigrams"
RUN = f"{MODEL} --steps 0 --sync-every 60 --fragment-fraction 0.005 --eval-every 1000"


def join(swarm: Swarm, directory: Path, machine: Machine, arguments: str, **settings: Any) -> Process:
    """`p2ptrain join` on a machine, listening on its own address alone."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(bigrams.__file__, directory)
    settings = {"host_maddrs": f"/ip4/{machine.address}/tcp/0", **settings}
    return swarm.start(f"p2ptrain join {arguments}", directory=directory, enter=machine.enter, settings=settings)


def join_all(
    swarm: Swarm, directory: Path, machines: Sequence[Machine], run: str = RUN, **settings: Any
) -> list[Process]:
    """A founder on the first machine and joiners on the others; all are there at the end."""
    founder = join(swarm, directory / "0", machines[0], run, **settings)
    swarm.until_ready(founder)
    joiners = [
        join(swarm, directory / str(i), machine, f"{MODEL} --initial-peers {founder.addresses}", **settings)
        for i, machine in enumerate(machines[1:], start=1)
    ]
    swarm.until_ready(*joiners)
    return [founder, *joiners]


def losses(peer: Process, since_s: float = 0.0) -> list[set[str]]:
    """Each time since then that a peer found others gone: who they were."""
    alive = [(event["t"], set(event["alive"])) for event in peer.events("peers")]
    return [before - after for (_, before), (t, after) in itertools.pairwise(alive) if before - after and t >= since_s]


def step_s(peer: Process, since_s: float = 0.0) -> float:
    """Seconds from step to step of training, the median of those since a time."""
    times = [event["t"] for event in peer.events("step") if event["t"] >= since_s]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def fragments(peer: Process, since_s: float = 0.0) -> tuple[int, int]:
    """Fragments that were pushed since a time, and those that were shed for lack of bandwidth."""
    events = [event for event in peer.events("fragments") if event["t"] >= since_s]
    return sum(e["sent"] for e in events), sum(e["skipped"].get("shed", 0) for e in events)


def memory_mib(peer: Process) -> float:
    """Resident memory of a peer and its daemon, in MiB."""
    process = psutil.Process(peer.pid)
    return float(sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])) / 2**20


def wait_for_rounds(swarm: Swarm, peers: Sequence[Process], *, by: int, since: int = 0, count: int = 1) -> None:
    """Until so many rounds by so many peers, numbered `since` or higher, have landed at every one of these."""
    swarm.until(lambda: all(len(peer.rounds(since, by=by)) >= count for peer in peers))
