"""Memory of a peer beyond model, gradients and inner optimizer, including its p2pd and imported libraries."""

from __future__ import annotations

import time

from benchmarks.measure import memory, reset_peak_memory
from benchmarks.row import Row
from benchmarks.shapes import gpt2_124m
from benchmarks.swarm import Setup, Swarm
from benchmarks.workloads import AdamStates
from p2ptrain.protocol.rounds.moving.part_store import KEEP_ALL_S

# 20 s between rounds: no round is under way when the memory at rest is read.
SETUP = Setup(gpt2_124m, AdamStates(0.1), fragment_fraction=0.005, sync_every=200)


def run() -> list[Row]:
    with Swarm(SETUP, peers=2) as swarm:
        for pid in swarm.pids:
            reset_peak_memory(pid)
        for _ in range(2):
            swarm.drift()
            swarm.round()
        time.sleep(KEEP_ALL_S + 3.0)  # background work has ended; a peer keeps only its part of the mean
        before, after = swarm.memory_before_join, [memory(pid) for pid in swarm.pids]
    size = 4 * gpt2_124m().numel
    rest = max(now.anonymous - start.anonymous for now, start in zip(after, before, strict=True)) / size
    peak = max(now.peak - start.resident for now, start in zip(after, before, strict=True)) / size
    return [
        _row("at rest, after two rounds", rest, 2.5),
        _row("at most during two rounds (int8)", peak, 3.5),
    ]


def _row(work: str, measured: float, limit: float) -> Row:
    return Row(
        work=f"124M parameters, 2 peers: {work}",
        must_reach=f"≤ {limit:g} × the parameters' bytes",
        measured=f"{measured:.2f} ×",
        reached=measured <= limit,
        values={"times_parameter_bytes": measured},
    )
