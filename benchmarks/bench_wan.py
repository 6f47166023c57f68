"""A round between machines that are far apart (`wan.c`), from the time it is due until it has landed on the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import bench_round, rival_gloo, rival_hivemind
from benchmarks.measure import Summary
from benchmarks.namespaces import Machine
from benchmarks.processes import WorkerError
from benchmarks.row import Row
from benchmarks.shapes import gpt_25m
from benchmarks.swarm import Setup
from benchmarks.wan import wide_area
from benchmarks.workloads import Pause

ROUNDS = 3
# Of the rivals, after one that is not counted. With two peers some of hivemind's rounds never end.
RIVAL_ROUNDS = 2
HIVEMIND_TIMEOUT_S = 60.0
STEP_S = 0.05
# What a round takes besides its bytes, at most: compute, round trips (guess).
MOST_COMPUTE_S = 8.0
# What a member of k sends in a round: (k − 1) / k of its outer gradient to reducers, and its part's mean to the k − 1
# others; each 66 bytes for 64 values.
BYTES = 25_481_216 * 66 / 64
# Of two peers, by the round trip.
WANTED_OF_TWO_S = {0.1: 3.5, 0.2: 2.2}


@dataclass(frozen=True)
class Network:
    """Links as `wan.c` describes them; the slowest one's rate in Mbit/s, the longest round trip in seconds."""

    title: str
    links: tuple[str, ...]
    mbit: float
    rtt_s: float

    @property
    def wanted_s(self) -> float:
        """Seconds that a round may take. It must also be faster than those of the rivals."""
        if len(self.links) == 2:
            return WANTED_OF_TWO_S.get(self.rtt_s, math.inf)
        return 1.25 * self.bytes_s + 6 * self.rtt_s + 1.0

    @property
    def bytes_s(self) -> float:
        """Seconds that a round's bytes take on the slowest uplink."""
        k = len(self.links)
        return 2 * (k - 1) / k * BYTES * 8 / (self.mbit * 1e6)


def _equal(k: int, title: str, link: str, mbit: float, rtt_s: float) -> Network:
    return Network(f"{k} peers, {title}", (link,) * k, mbit, rtt_s)


NETWORKS = [
    *(
        network
        for k in (2, 4, 8)
        for network in (
            _equal(k, "100 Mbit/s, 4 ms", "mbit=100,ms=1", 100, 0.004),
            _equal(k, "100 Mbit/s, 100 ms", "mbit=100,ms=25", 100, 0.1),
            _equal(k, "1 Gbit/s, 200 ms", "mbit=1000,ms=50", 1000, 0.2),
        )
    ),
    _equal(4, "100 down, 20 up, 60 ms", "mbit=100,up=20,ms=15", 20, 0.06),
    Network("4 peers, one of 20, three of 100 Mbit/s, 60 ms", ("mbit=100,ms=15",) * 3 + ("mbit=20,ms=15",), 20, 0.06),
    _equal(4, "100 Mbit/s, 100 ms, 0.1 % loss", "mbit=100,ms=25,loss=0.0005", 100, 0.1),
]


def run(networks: Sequence[Network] = NETWORKS) -> list[Row]:
    rows = []
    for network in networks:
        with wide_area(*network.links) as machines:
            try:
                rows.append(_row(network, machines))
            except WorkerError as error:  # the others are worth an hour
                rows.append(Row(f"a round, {network.title}", "", f"not measured: {error}", reached=False))
    return rows


def _row(network: Network, machines: Sequence[Machine]) -> Row:
    # Longer than a round takes, so that none is due while peers still wait for each other after the last one.
    sync_every = round((2 * network.bytes_s + MOST_COMPUTE_S) / STEP_S)
    setup = Setup(gpt_25m, Pause(STEP_S), sync_every=sync_every, machines=tuple(machines), round_steps=2000)
    ours = bench_round.measure(setup, len(machines), ROUNDS)
    gloo = {
        name: _seconds(rival_gloo.measure(machines, dtype, rounds=RIVAL_ROUNDS))
        for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16))
    }
    took_s = _seconds(ours.wall_s) if ours.wall_s else float("inf")
    hivemind_s, told = _hivemind(machines)
    return Row(
        work=f"a round, 25M parameters, int8, {network.title}: due to landed, slowest peer",
        must_reach="faster than gloo and hivemind"
        + (f", ≤ {network.wanted_s:.1f} s" if network.wanted_s < math.inf else ""),
        measured=f"{took_s:.2f} s ({network.bytes_s / took_s:.0%} of the link); {ours.failed} of {ROUNDS} failed",
        reached=took_s < min(*gloo.values(), hivemind_s) and took_s <= network.wanted_s,
        rival="gloo: "
        + ", ".join(f"{seconds:.2f} s {name}" for name, seconds in gloo.items())
        + f"; hivemind fp16: {told}",
        values={"wall_s": took_s, "bytes_s": network.bytes_s, "rtt_s": network.rtt_s, "hivemind": hivemind_s, **gloo},
    )


def _hivemind(machines: Sequence[Machine]) -> tuple[float, str]:
    """Seconds of hivemind's rounds, infinite if none worked, and that in words."""
    try:
        rounds = rival_hivemind.measure(
            state_sharing=False, peers=len(machines), rounds=RIVAL_ROUNDS, machines=machines,
            round_timeout_s=HIVEMIND_TIMEOUT_S,
        )  # fmt: skip
    except WorkerError as error:
        return float("inf"), f"did not work ({str(error).splitlines()[0]})"
    if not rounds.seconds:
        return float("inf"), f"no round worked within {HIVEMIND_TIMEOUT_S:.0f} s"
    seconds = _seconds(rounds.seconds)
    return seconds, f"{seconds:.2f} s, {rounds.failed} of {RIVAL_ROUNDS} failed"


def _seconds(measured: Sequence[float]) -> float:
    return Summary.of(measured).median
